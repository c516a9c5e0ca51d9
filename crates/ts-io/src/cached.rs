// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small text files that make later runs faster, such as measured speeds.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Result, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most bytes of such a file.
const MAX_BYTES: u64 = 16 << 20;
/// An unfinished file that is older than this was left by a process that has ended.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// Returns the directory for files that make later runs faster: `tensorstream` under
/// `$XDG_CACHE_HOME`, or else under `.cache` in the home directory of the user. `None` if neither
/// is an absolute path.
pub fn cache_directory() -> Option<PathBuf> {
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let caches = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).and_then(absolute);
    let caches = caches.or_else(|| Some(std::env::home_dir().and_then(absolute)?.join(".cache")));
    caches.map(|caches| caches.join("tensorstream"))
}

/// Reads a file that [`write_cached`] has written. Returns `None` if it cannot be read, is not a
/// regular file, is too long or is not UTF-8: it is made again then.
pub fn read_cached(path: &Path) -> Option<String> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK); // opening a pipe would block
    }
    let file = options.open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    let len = file.take(MAX_BYTES + 1).read_to_string(&mut text).ok()?;
    (len as u64 <= MAX_BYTES).then_some(text)
}

/// Writes a file atomically, and creates its directory. Does nothing if another process is writing
/// it.
///
/// # Errors
/// Returns an error if the file cannot be written. It can be ignored, because such a file only
/// saves time.
pub fn write_cached(path: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("")))?;
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let Some(mut file) = create_unless_written(&partial)? else { return Ok(()) };
    let written = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Creates a file. Returns `None` if another process has just created it.
fn create_unless_written(partial: &Path) -> Result<Option<File>> {
    match File::create_new(partial) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        created => return created.map(Some),
    }
    let age = fs::symlink_metadata(partial)?.modified()?.elapsed();
    if age.is_ok_and(|age| age < ABANDONED_AFTER) {
        return Ok(None);
    }
    fs::remove_file(partial)?;
    File::create_new(partial).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_text_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/speeds");
        assert_eq!(read_cached(&path), None);
        write_cached(&path, "fast").unwrap();
        assert_eq!(read_cached(&path).as_deref(), Some("fast"));
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_cached(&path), None);
        File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(read_cached(&path), None);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(read_cached(&path), None);
        assert!(write_cached(&path, "fast").is_err());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        assert_eq!(read_cached(&path), None);
        write_cached(&path, "fast").unwrap();
        assert_eq!(read_cached(&path).as_deref(), Some("fast"));
    }

    #[test]
    fn files_of_processes_that_were_killed_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (path, partial) = (directory.path().join("a"), directory.path().join("a.partial"));
        let left = File::create(&partial).unwrap();
        write_cached(&path, "fast").unwrap();
        assert_eq!(read_cached(&path), None, "another process may be writing it");
        left.set_modified(std::time::SystemTime::now() - 2 * ABANDONED_AFTER).unwrap();
        drop(left); // Windows removes a file when it is closed
        write_cached(&path, "fast").unwrap();
        assert_eq!(read_cached(&path).as_deref(), Some("fast"));
        assert!(!partial.exists());
    }
}
