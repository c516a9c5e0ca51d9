// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts the descriptors of open files, so that checkpoints of hundreds of files leave enough to
//! the rest of the process.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys;

/// A file needs one descriptor. Up to two more make its reads faster. All files together take at
/// most one in `SHARE` of the descriptors of the process for these.
const SHARE: u64 = 2;

/// The descriptors of files that are open in this process.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// A descriptor that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Descriptor(());

impl Descriptor {
    /// Counts a descriptor that a file needs.
    ///
    /// Raises the limit of the process as far as the system allows if less than half of it would be
    /// left. Otherwise, models of many files would fail although the system permits them.
    pub(crate) fn required() -> Self {
        let open = OPEN.fetch_add(1, Ordering::Relaxed) + 1;
        raise_limit(open);
        Self(())
    }

    /// Counts a descriptor that makes reads faster. Returns `None` if files have their share of the
    /// descriptors of the process.
    pub(crate) fn optional() -> Option<Self> {
        let descriptor = Self(());
        let open = OPEN.fetch_add(1, Ordering::Relaxed) + 1;
        (open <= raise_limit(open) / SHARE).then_some(descriptor)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Makes the limit of the process large enough for `open` descriptors of files, if the system
/// allows this. Returns the limit.
fn raise_limit(open: u64) -> u64 {
    sys::raise_descriptor_limit(open.next_power_of_two().saturating_mul(SHARE))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use crate::Source;
    use crate::sys;

    /// Opens files until the limit of this process is reached. Runs in a process of its own.
    #[test]
    #[ignore = "a child process runs it"]
    fn child_opens_many_files() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/../../target");
        let dir = dir.unwrap();
        let path = |i: usize| dir.path().join(i.to_string());
        let open = |i: usize| {
            std::fs::write(path(i), [i as u8; 8192]).unwrap();
            let source = Source::open(path(i)).unwrap();
            std::fs::remove_file(path(i)).unwrap();
            source
        };
        let limit = sys::raise_descriptor_limit(0);
        let sources: Vec<_> = (0..limit as usize * 2 / 3).map(open).collect();
        let direct = sources.iter().filter(|source| source.direct_alignment().is_ok()).count();
        let raised = sys::raise_descriptor_limit(0);
        println!("{limit} {raised} {direct}");
        let left: Vec<_> = (0..16).map(|_| std::fs::File::open("/dev/null")).collect();
        assert!(left.iter().all(Result::is_ok), "the process has descriptors left");
        for (i, source) in sources.iter().enumerate() {
            let mut bytes = [0; 4];
            assert_eq!(source.read_at(4096, &mut bytes).unwrap(), 4);
            assert_eq!(bytes, [i as u8; 4]);
        }
    }

    /// Runs the test above under limits, and returns what it printed.
    fn under_limits(soft: u32, hard: u32) -> Vec<u64> {
        let test = std::env::current_exe().expect("the test has a path");
        let name = "descriptors::tests::child_opens_many_files";
        let run = format!(
            "ulimit -Sn {soft} && ulimit -Hn {hard} && \
             exec '{}' --ignored --exact --nocapture {name}",
            test.display()
        );
        let output = Command::new("sh").args(["-c", &run]).output().expect("there is a shell");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let line = text.lines().find(|line| line.split(' ').all(|n| n.parse::<u64>().is_ok()));
        line.unwrap_or_else(|| panic!("{text}")).split(' ').filter_map(|n| n.parse().ok()).collect()
    }

    #[test]
    fn many_files_raise_the_limit_or_do_without_handles_that_only_make_reads_faster() {
        let [soft, raised, direct] = under_limits(96, 1024)[..] else { panic!("three numbers") };
        assert_eq!(soft, 96);
        assert!((97..=1024).contains(&raised), "{raised}");
        // Without a file system that supports direct I/O there are none.
        assert!(direct == 0 || direct == 64, "{direct}");
        let [_, fixed, few] = under_limits(96, 96)[..] else { panic!("three numbers") };
        assert_eq!((fixed, few), (96, 0), "64 files leave no room for other handles");
    }
}
