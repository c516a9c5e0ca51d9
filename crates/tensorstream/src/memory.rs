// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that is available to this process.

use std::fs;
use std::path::Path;

/// Returns the memory that this process can still allocate without swapping, in bytes.
///
/// This is the least of these: the available memory of the system, what the limits of the process's
/// cgroups and their ancestors leave, and what the limits of the process on its address space and
/// its data (`ulimit -v` and `-d`) leave. Returns `None` if the memory cannot be detected, for
/// example on systems other than Linux.
///
/// The page cache and reclaimable slabs of a cgroup count as available, except for the first 128
/// MiB of mapped pages. Mapped pages contain the code and data of libraries. Programs use only a
/// part of them, and would soon read this part from disk again after an eviction.
///
/// ```
/// if let Some(bytes) = tensorstream::available_bytes() {
///     println!("{} MiB available", bytes >> 20);
/// }
/// ```
pub fn available_bytes() -> Option<u64> {
    let system = meminfo_available(&fs::read_to_string("/proc/meminfo").ok()?);
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = cgroups
        .lines()
        .filter_map(|line| hierarchy_available(line, Path::new("/sys/fs/cgroup")))
        .min();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let process = fs::read_to_string("/proc/self/limits")
        .ok()
        .and_then(|limits| process_available(&limits, &status));
    [system, group, process].into_iter().flatten().min()
}

/// Returns what the limits of a process leave of its address space and its data, in bytes. `limits`
/// and `status` are the contents of the files in /proc.
fn process_available(limits: &str, status: &str) -> Option<u64> {
    let left = |limit: &str, used: &str| {
        let soft = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let soft: u64 = soft.split_whitespace().next()?.parse().ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(used))?;
        let used: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(soft.saturating_sub(used.saturating_mul(1024)))
    };
    [left("Max address space", "VmSize:"), left("Max data size", "VmData:")]
        .into_iter()
        .flatten()
        .min()
}

fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The file names of a version of the cgroup memory controller.
struct Controller {
    /// Root directory, below the mount point.
    root: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    /// Keys of `memory.stat` for memory that can be reclaimed, and that the usage includes.
    cached: &'static [&'static str],
    /// Key of `memory.stat` for mapped pages.
    mapped: &'static str,
}

/// The most mapped pages that count as used, in bytes. PyTorch and transformers map about 270 MiB,
/// and compute a Llama as fast with 114 MiB of them, but slower with 16 MiB.
const MAPPED_IN_USE: u64 = 128 << 20;

const V1: Controller = Controller {
    root: "memory",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cached: &["total_inactive_file", "total_active_file"],
    mapped: "total_mapped_file",
};
const V2: Controller = Controller {
    root: "",
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cached: &["inactive_file", "active_file", "slab_reclaimable"],
    mapped: "file_mapped",
};

/// Returns the least available memory of a cgroup and its ancestors. `line` is a line of
/// /proc/self/cgroup: `id:controllers:path`, where version 2 has no controllers.
fn hierarchy_available(line: &str, mount: &Path) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
    let controller = match controllers {
        "" => V2,
        _ if controllers.split(',').any(|name| name == "memory") => V1,
        _ => return None,
    };
    let root = mount.join(controller.root);
    // In a container, the path may be the path on the host. The root is then the container's group.
    root.join(path)
        .ancestors()
        .take_while(|group| group.starts_with(&root))
        .filter_map(|group| controller.available(group))
        .min()
}

impl Controller {
    /// Returns the memory in bytes that the limit of one group leaves.
    fn available(&self, group: &Path) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(group.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let limit = self.limits.iter().filter_map(|name| number(name)).min()?;
        let stat = read("memory.stat").unwrap_or_default();
        let line = |name: &str| -> u64 {
            let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        let cached = self.cached.iter().map(|name| line(name)).sum::<u64>();
        let in_use = line(self.mapped).min(MAPPED_IN_USE);
        let used = number(self.usage)?.saturating_sub(cached.saturating_sub(in_use));
        Some(limit.saturating_sub(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   5 kB\n"), Some(5120));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn limits_of_the_process_count() {
        let limits = "Limit   Soft Limit  Hard Limit  Units\n\
                      Max data size             9000                 9000                 bytes\n\
                      Max address space         unlimited            unlimited            bytes\n";
        let status = "VmSize:\t      50 kB\nVmData:\t       3 kB\n";
        assert_eq!(process_available(limits, status), Some(9000 - 3 * 1024));
        assert_eq!(process_available(&limits.replace("9000", "unlimited"), status), None);
        assert_eq!(process_available(&limits.replace("9000", "1"), status), Some(0));
    }

    #[test]
    fn few_mapped_pages_count_as_used() {
        let mount = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| fs::write(mount.path().join(name), text).unwrap();
        let mib = 1u64 << 20;
        write("memory.max", (1000 * mib).to_string());
        write("memory.current", (900 * mib).to_string());
        for (mapped, available) in [(0, 500), (100, 400), (128, 372), (300, 372)] {
            let stat = format!(
                "inactive_file {}\nactive_file {}\nslab_reclaimable {}\nfile_mapped {}\n",
                300 * mib,
                80 * mib,
                20 * mib,
                mapped * mib
            );
            write("memory.stat", stat);
            assert_eq!(V2.available(mount.path()), Some(available * mib));
        }
    }

    #[test]
    fn the_tightest_limit_of_all_cgroups_applies() {
        let mount = tempfile::tempdir().unwrap();
        let write = |path: &str, files: &[(&str, &str)]| {
            let group = mount.path().join(path);
            fs::create_dir_all(&group).unwrap();
            files.iter().for_each(|(name, text)| fs::write(group.join(name), text).unwrap());
        };
        let stat = "total_inactive_file 300\ntotal_active_file 200\ntotal_mapped_file 100\n";
        write(
            "memory",
            &[("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "5000")],
        );
        write(
            "memory/a",
            &[
                ("memory.limit_in_bytes", "1000\n"),
                ("memory.usage_in_bytes", "900\n"),
                ("memory.stat", stat),
            ],
        );
        write("memory/a/b", &[("memory.limit_in_bytes", "2000"), ("memory.usage_in_bytes", "600")]);
        assert_eq!(
            hierarchy_available("4:memory:/a/b", mount.path()),
            Some(500),
            "the limit of the parent is lower"
        );
        assert_eq!(
            hierarchy_available("4:memory:/a", mount.path()),
            Some(500),
            "cached pages are available, except for mapped ones"
        );
        let unknown = hierarchy_available("4:cpuset,memory:/path/of/host", mount.path()).unwrap();
        assert!(unknown > 1 << 40);
        write(
            "x",
            &[
                ("memory.max", "max"),
                ("memory.high", "700"),
                ("memory.current", "200"),
                ("memory.stat", "file_mapped 5\n"),
            ],
        );
        assert_eq!(hierarchy_available("0::/x", mount.path()), Some(500));
        assert_eq!(hierarchy_available("3:cpu:/x", mount.path()), None);
    }
}
