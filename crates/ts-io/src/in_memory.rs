// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sources whose bytes are already in memory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Error;
use crate::source::{Fingerprint, Origin};

pub(crate) struct InMemoryOrigin {
    name: PathBuf,
    fingerprint: Fingerprint,
    bytes: Box<dyn AsRef<[u8]> + Send + Sync>,
}

impl InMemoryOrigin {
    pub(crate) fn new(name: PathBuf, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let fingerprint = Fingerprint::default().with_len(bytes.as_ref().len() as u64);
        Self { name, fingerprint, bytes: Box::new(bytes) }
    }
}

impl Origin for InMemoryOrigin {
    fn path(&self) -> &Path {
        &self.name
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], _: Duration) -> Result<usize, Error> {
        let bytes = (*self.bytes).as_ref();
        let begin = usize::try_from(offset).map_or(bytes.len(), |at| at.min(bytes.len()));
        let len = (bytes.len() - begin).min(buffer.len());
        buffer[..len].copy_from_slice(&bytes[begin..begin + len]);
        Ok(len)
    }
}

impl fmt::Debug for InMemoryOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes in memory, {:?}", self.fingerprint.len, self.name)
    }
}
