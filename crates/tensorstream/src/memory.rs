// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sizes as people write them, and how much memory there is.

use std::fs;
use std::path::Path;

/// Memory that this process could still take without swapping, in bytes: what the system calls available, or
/// what its memory cgroup leaves if that is less. `None` where neither can be read.
pub fn available_bytes() -> Option<u64> {
    let system = meminfo_available(&fs::read_to_string("/proc/meminfo").ok()?);
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = cgroups.lines().filter_map(cgroup_left).min();
    [system, group].into_iter().flatten().min()
}

fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the group of one line of /proc/self/cgroup leaves: `id:controllers:path`, no controllers for version 2.
fn cgroup_left(line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
    let (root, limit, usage) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
        "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        _ => return None,
    };
    let read = |name| -> Option<u64> {
        fs::read_to_string(Path::new(root).join(path).join(name)).ok()?.trim().parse().ok()
    };
    // The page cache counts as usage and can be reclaimed, so this errs on the side of less.
    Some(read(limit)?.saturating_sub(read(usage)?))
}

/// A size that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no size: write bytes (629145600) or a number with a unit (600MiB, 0.5GiB, 1.5GB)")]
pub struct BadSize(String);

/// Reads a size: a number and, optionally, one of B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB
/// (powers of 1024), in any case. Fractions are rounded down to bytes.
///
/// # Errors
/// [`BadSize`] for anything else, negative and non-finite numbers included.
pub fn parse_bytes(text: &str) -> Result<u64, BadSize> {
    const UNITS: [(&str, f64); 9] = [
        ("kib", 1024.0),
        ("mib", 1048576.0),
        ("gib", 1073741824.0),
        ("tib", 1099511627776.0),
        ("kb", 1e3),
        ("mb", 1e6),
        ("gb", 1e9),
        ("tb", 1e12),
        ("b", 1.0),
    ];
    let lower = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|(unit, scale)| Some((lower.strip_suffix(unit)?, *scale)));
    let (number, scale) = unit.unwrap_or((&lower, 1.0));
    let bytes = number.trim().parse::<f64>().map(|n| n * scale);
    match bytes {
        Ok(n) if (0.0..1.8e19).contains(&n) => Ok(n as u64),
        _ => Err(BadSize(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("600MiB", 600 << 20),
            ("0.5 GiB", 512 << 20),
            ("1.5GB", 1_500_000_000),
            ("4096", 4096),
            ("10b", 10),
            (" 2kb ", 2000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1GB", "1e400", "nan", "12 parsecs", "1 2"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   5 kB\n"), Some(5120));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
        assert_eq!(cgroup_left("3:cpu:/x"), None);
    }
}
