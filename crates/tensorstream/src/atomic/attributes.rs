// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a file has besides its bytes: owner, permissions, names, and locks.

use std::fs::{self, File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// Opens a file, unless the path is a symbolic link or not a regular file.
///
/// # Errors
/// Returns an error if the file has other names, or if another user has put it there.
#[cfg(unix)]
pub(super) fn open_without_following(options: &mut OpenOptions, path: &Path) -> Result<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    use rustix::fs::OFlags;

    let refused = |reason| Err(Error::other(reason));
    // To open a pipe would block.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match options.custom_flags(flags.bits() as i32).open(path) {
        Err(error) if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) => {
            return Err(not_regular(error.kind()));
        }
        opened => opened?,
    };
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(not_regular(ErrorKind::Other));
    }
    if found.nlink() > 1 {
        return refused("the file has other names; remove this one");
    }
    // Some network file systems give all files to one user, so the directory decides too.
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    let is_shared = fs::metadata(directory.unwrap_or(Path::new(".")))?.mode() & 0o022 != 0;
    if is_shared && found.uid() != rustix::process::geteuid().as_raw() {
        return refused("the file belongs to another user; remove it");
    }
    Ok(file)
}

#[cfg(not(unix))]
pub(super) fn open_without_following(options: &mut OpenOptions, path: &Path) -> Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(not_regular(ErrorKind::Other));
    }
    options.open(path)
}

fn not_regular(kind: ErrorKind) -> Error {
    Error::new(kind, "the path exists and is not a regular file; remove it")
}

/// Returns the number of names of the file at `path`, or 0 if there is none.
#[cfg(unix)]
pub(super) fn names(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or(0, |found| found.nlink())
}

#[cfg(not(unix))]
pub(super) fn names(path: &Path) -> u64 {
    u64::from(path.exists())
}

/// Gives `file` the owner, the permissions and the extended attributes, such as an access control
/// list, of the file at `path`, if there is one.
///
/// Only a privileged process can give files to another user. Then the file keeps its own user, and
/// gets the group if this user is in it. Extended attributes are optional.
#[cfg(unix)]
pub(super) fn take_over(file: &File, path: &Path) -> Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};

    let (own, old) = match (file.metadata(), fs::metadata(path)) {
        (Ok(own), Ok(old)) => (own, old),
        (_, Err(error)) if error.kind() == ErrorKind::NotFound => return Ok(()),
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    if (own.uid(), own.gid()) != (old.uid(), old.gid())
        && fchown(file, Some(old.uid()), Some(old.gid())).is_err()
    {
        let _ = fchown(file, None, Some(old.gid()));
    }
    copy_extended_attributes(file, path);
    // After the attributes: the access control list has permissions too.
    take_permissions(file, path)
}

/// Gives `file` the permissions of the file at `path`, if there is one. Some file systems have the
/// same permissions for all files, and cannot change them.
#[cfg(unix)]
pub(super) fn take_permissions(file: &File, path: &Path) -> Result<()> {
    let old = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        old => old?.permissions(),
    };
    if file.metadata()?.permissions() == old { Ok(()) } else { file.set_permissions(old) }
}

#[cfg(not(unix))]
pub(super) fn take_permissions(_: &File, _: &Path) -> Result<()> {
    Ok(())
}

#[cfg(not(unix))]
pub(super) fn take_over(_: &File, _: &Path) -> Result<()> {
    Ok(())
}

#[cfg(target_os = "linux")]
fn copy_extended_attributes(file: &File, path: &Path) {
    use rustix::fs::{XattrFlags, fsetxattr, getxattr, listxattr};

    /// The most bytes of a list of names, and of a value, on Linux.
    const MAX_BYTES: usize = 64 << 10;
    let mut names = vec![0; MAX_BYTES];
    let mut value = vec![0; MAX_BYTES];
    let len = listxattr(path, &mut names[..]).unwrap_or(0);
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if let Ok(len) = getxattr(path, name, &mut value[..]) {
            let _ = fsetxattr(file, name, &value[..len], XattrFlags::empty());
        }
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn copy_extended_attributes(_: &File, _: &Path) {}

/// Returns whether an error of a lock means that the file system has no locks.
pub(super) fn has_no_locks(error: &Error) -> bool {
    #[cfg(unix)]
    if error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error()) {
        return true;
    }
    error.kind() == ErrorKind::Unsupported
}
