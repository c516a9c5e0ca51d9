// SPDX-License-Identifier: MIT OR Apache-2.0
//! The energy that the processors of this computer use.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::Error;

/// Where Linux shows the counters.
const FOLDER: &str = "/sys/class/powercap";
/// How the names of counters begin. Some processors show the same counters a second time, under
/// `intel-rapl-mmio`.
const PREFIX: &str = "intel-rapl:";

/// The energy counters of the processors of Intel and AMD (RAPL, "running average power limit"), as
/// Linux shows them under `/sys/class/powercap`.
///
/// They count what the whole computer does, not only this program. GPUs are not part of them. Most
/// virtual machines have no such counters, and only root can read them by default.
///
/// # Examples
/// ```
/// use ts_streams::EnergyMeter;
///
/// match EnergyMeter::open() {
///     Ok(mut meter) => {
///         let sum: u64 = (0..1_000_000).sum();
///         println!("{sum} took {} J", meter.read()?.joules());
///     }
///     Err(error) => println!("not measured: {error}"),
/// }
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug)]
pub struct EnergyMeter {
    counters: Vec<Counter>,
}

/// The energy that was used since an [`EnergyMeter`] was opened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Energy {
    /// Each counter.
    pub domains: Vec<EnergyDomain>,
}

/// The energy of one part of the computer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct EnergyDomain {
    /// The name, for example `package-0` for a processor, or `package-0/dram` for its memory.
    pub name: String,
    /// The energy in joules.
    pub joules: f64,
    /// Whether another domain contains this one, so that a sum must not.
    pub is_part: bool,
}

impl Energy {
    /// Returns the energy of all processors and their memory, in joules.
    pub fn joules(&self) -> f64 {
        let whole = self.domains.iter().filter(|domain| !domain.is_part);
        whole.map(|domain| domain.joules).sum()
    }
}

#[derive(Debug)]
struct Counter {
    name: String,
    is_part: bool,
    file: PathBuf,
    /// The counter begins again at 0 after this value.
    range_uj: u64,
    latest_uj: u64,
    used_uj: u64,
}

impl EnergyMeter {
    /// Opens the counters of this computer.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`], with what is missing, if there are none, or if this user
    /// cannot read them.
    pub fn open() -> Result<Self, Error> {
        Self::open_at(Path::new(FOLDER))
    }

    /// Opens the counters under a folder with the layout of `/sys/class/powercap`.
    ///
    /// # Errors
    /// The same as for [`open`](Self::open).
    pub fn open_at(folder: &Path) -> Result<Self, Error> {
        let names = fs::read_dir(folder).and_then(|entries| {
            let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            names.collect::<io::Result<Vec<String>>>()
        });
        let missing = "this computer shows no energy counters of its processors (they need Linux, \
                       and most virtual machines have none)";
        let mut names = names.map_err(|error| {
            unavailable(format!("cannot list {}: {error}; {missing}", folder.display()))
        })?;
        names.retain(|name| name.starts_with(PREFIX));
        names.sort_unstable();
        let counters: Result<Vec<_>, Error> =
            names.iter().map(|name| Counter::open(folder, name)).collect();
        // A platform contains its processors, on the computers that count it.
        let counters: Vec<_> = counters?.into_iter().filter(|c| c.name != "psys").collect();
        if counters.is_empty() {
            return Err(unavailable(format!("{} is empty; {missing}", folder.display())));
        }
        Ok(Self { counters })
    }

    /// Returns the energy that was used since the meter was opened.
    ///
    /// Call this at least once in five minutes: a counter begins again at 0, on a large processor
    /// under load after less than ten minutes, and two such beginnings look like one.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if a counter cannot be read any more.
    pub fn read(&mut self) -> Result<Energy, Error> {
        let domains = self.counters.iter_mut().map(|counter| {
            counter.update()?;
            let (name, joules) = (counter.name.clone(), counter.used_uj as f64 / 1e6);
            Ok(EnergyDomain { name, joules, is_part: counter.is_part })
        });
        Ok(Energy { domains: domains.collect::<Result<_, Error>>()? })
    }
}

impl Counter {
    /// Opens the counter `intel-rapl:0`, or `intel-rapl:0:1`, which is a part of it.
    fn open(folder: &Path, entry: &str) -> Result<Self, Error> {
        let own = folder.join(entry);
        let name = text(&own.join("name"))?;
        let whole = entry.rsplit_once(':').map(|(whole, _)| whole);
        let name_of_whole = match whole.filter(|whole| whole.len() >= PREFIX.len()) {
            Some(whole) => Some(text(&folder.join(whole).join("name"))?),
            None => None,
        };
        // The memory is next to the cores, but not a part of what the processor counts.
        let is_part = name_of_whole.is_some() && name != "dram";
        let name = name_of_whole.map_or(name.clone(), |whole| format!("{whole}/{name}"));
        let (file, range_uj) = (own.join("energy_uj"), number(&own.join("max_energy_range_uj"))?);
        let latest_uj = number(&file)?;
        Ok(Self { name, is_part, file, range_uj, latest_uj, used_uj: 0 })
    }

    fn update(&mut self) -> Result<(), Error> {
        let now_uj = number(&self.file)?;
        let used = match now_uj.checked_sub(self.latest_uj) {
            Some(used) => used,
            None => now_uj + self.range_uj.saturating_sub(self.latest_uj),
        };
        (self.latest_uj, self.used_uj) = (now_uj, self.used_uj + used);
        Ok(())
    }
}

fn unavailable(reason: String) -> Error {
    Error::DeviceUnavailable { device: "energy counters".into(), reason }
}

fn text(path: &Path) -> Result<String, Error> {
    let text = fs::read_to_string(path).map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::PermissionDenied => "; run as root, or let root make it readable",
            _ => "",
        };
        unavailable(format!("cannot read {}: {error}{remedy}", path.display()))
    })?;
    Ok(text.trim().to_owned())
}

fn number(path: &Path) -> Result<u64, Error> {
    let text = text(path)?;
    text.parse().map_err(|_| unavailable(format!("{} is no number: {text:?}", path.display())))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::EnergyMeter;

    fn set(folder: &Path, entry: &str, values: &[(&str, &str)]) {
        fs::create_dir_all(folder.join(entry)).expect("the folder can be made");
        for (file, value) in values {
            fs::write(folder.join(entry).join(file), format!("{value}\n"))
                .expect("the file can be written");
        }
    }

    fn counter(folder: &Path, entry: &str, name: &str, uj: &str) {
        set(
            folder,
            entry,
            &[("name", name), ("energy_uj", uj), ("max_energy_range_uj", "1000000")],
        );
    }

    #[test]
    fn counters_are_read_and_begin_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        set(folder, "intel-rapl", &[("enabled", "1")]);
        counter(folder, "intel-rapl:0", "package-0", "900000");
        counter(folder, "intel-rapl:0:0", "core", "100000");
        counter(folder, "intel-rapl:0:1", "dram", "0");
        counter(folder, "intel-rapl:1", "psys", "0");
        counter(folder, "intel-rapl-mmio:0", "package-0", "0");
        let mut meter = EnergyMeter::open_at(folder).unwrap();
        assert_eq!(meter.read().unwrap().joules(), 0.0);
        for (package, core, dram) in [("950000", "110000", "5000"), ("100000", "150000", "10000")] {
            counter(folder, "intel-rapl:0", "package-0", package);
            counter(folder, "intel-rapl:0:0", "core", core);
            counter(folder, "intel-rapl:0:1", "dram", dram);
            meter.read().unwrap();
        }
        let energy = meter.read().unwrap();
        let domains = energy.domains.iter().map(|d| (d.name.as_str(), d.joules, d.is_part));
        let expected = [
            ("package-0", 0.2, false),
            ("package-0/core", 0.05, true),
            ("package-0/dram", 0.01, false),
        ];
        assert!(domains.eq(expected), "{energy:?}");
        assert!((energy.joules() - 0.21).abs() < 1e-9);
    }

    #[test]
    fn what_is_missing_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let error = |folder: &Path| EnergyMeter::open_at(folder).unwrap_err().to_string();
        assert!(error(&folder.join("none")).contains("cannot list"));
        assert!(error(folder).contains("shows no energy counters"));
        counter(folder, "intel-rapl:0", "package-0", "many");
        assert!(error(folder).contains("energy_uj is no number: \"many\""));
        fs::remove_file(folder.join("intel-rapl:0/energy_uj")).unwrap();
        assert!(error(folder).contains("cannot read"));
    }
}
