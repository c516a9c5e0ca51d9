// SPDX-License-Identifier: MIT OR Apache-2.0
//! Comparison of checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use ts_format::{CHUNK_LEN, Tensor, TensorMeta};

use crate::metadata::merged_metadata;
use crate::pieces::{Threads, for_each_piece};
use crate::progress::Watch;
use crate::read::{Reader, ReaderPool};
use crate::{Checkpoint, Error};

/// The differences between two checkpoints, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Difference {
    /// Metadata keys whose values differ, with the values in the first and the second checkpoint. A
    /// value is `None` if the checkpoint does not have the key.
    pub metadata: BTreeMap<String, (Option<String>, Option<String>)>,
    /// Tensors that differ, by name.
    pub tensors: BTreeMap<String, TensorDifference>,
    /// Number of tensors that are identical, bit for bit.
    pub same: usize,
}

/// A difference between two checkpoints in one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorDifference {
    /// Only the first checkpoint has this tensor.
    OnlyFirst,
    /// Only the second checkpoint has this tensor.
    OnlySecond,
    /// The dtypes or shapes differ. Contains the type in the first and in the second checkpoint.
    Meta(TensorMeta, TensorMeta),
    /// The values differ.
    Values {
        /// Number of elements that differ. For dtypes smaller than a byte, number of bytes.
        differing: u64,
        /// Total number of elements. For dtypes smaller than a byte, total number of bytes.
        total: u64,
    },
}

impl Difference {
    /// Returns whether the checkpoints are equal.
    pub fn is_empty(&self) -> bool {
        self.metadata.is_empty() && self.tensors.is_empty()
    }
}

impl fmt::Display for TensorDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnlyFirst => write!(f, "only in the first"),
            Self::OnlySecond => write!(f, "only in the second"),
            Self::Meta(a, b) => {
                write!(f, "{} {:?} and {} {:?}", a.dtype.name(), a.shape, b.dtype.name(), b.shape)
            }
            Self::Values { differing, total } => {
                write!(f, "{differing} of {total} elements differ")
            }
        }
    }
}

/// Compares two checkpoints bit for bit. Their formats and numbers of files may differ. At most
/// `jobs` threads decode or compute checksums at a time; 0 means the number of cores. Blocks.
///
/// A tensor whose fingerprints in both checkpoints are equal is not read.
///
/// # Errors
/// - The errors of [`Checkpoint::open`].
/// - [`Error::Io`] if a read fails.
/// - [`Error::Corrupt`] if a tensor is damaged.
/// - [`Error::Interrupted`] if `watch` returns true.
pub fn diff(
    first: &Path,
    second: &Path,
    jobs: usize,
    watch: &mut Watch<'_>,
) -> Result<Difference, Error> {
    let (first, second) = (Checkpoint::open(first)?, Checkpoint::open(second)?);
    let mut found = Difference { metadata: metadata(&first, &second), ..Difference::default() };
    let mut to_compare: Vec<(Tensor<'_>, Tensor<'_>)> = Vec::new();
    let only_second =
        second.catalog().tensors().filter(|t| first.catalog().tensor(t.name()).is_none());
    let only_second =
        only_second.map(|tensor| (tensor.name().into(), TensorDifference::OnlySecond));
    found.tensors.extend(only_second);
    for a in first.catalog().tensors_by_offset() {
        let difference = match second.catalog().tensor(a.name()) {
            None => TensorDifference::OnlyFirst,
            Some(b) if a.meta() != b.meta() => TensorDifference::Meta(a.meta(), b.meta()),
            Some(b) if a.fingerprint().is_some() && a.fingerprint() == b.fingerprint() => {
                found.same += 1;
                continue;
            }
            Some(b) => {
                to_compare.push((a, b));
                continue;
            }
        };
        found.tensors.insert(a.name().into(), difference);
    }
    let lens: Vec<u64> = to_compare.iter().map(|(a, _)| a.range().len).collect();
    let mut differing = vec![0; to_compare.len()];
    let compare = |buffers: &mut [(Reader, Vec<u8>); 2], index: usize, begin: u64, len: usize| {
        let (a, b) = to_compare[index];
        for ((checkpoint, tensor), (reader, bytes)) in
            [(&first, a), (&second, b)].into_iter().zip(&mut *buffers)
        {
            bytes.resize(len, 0);
            reader.read_checked(checkpoint, tensor, begin, bytes)?;
        }
        let [(_, a), (_, b)] = buffers;
        let size = element_bytes(to_compare[index].0);
        let pairs = a.chunks(size).zip(b.chunks(size));
        Ok(if a == b { 0 } else { pairs.filter(|(a, b)| a != b).count() as u64 })
    };
    let init = |readers: &ReaderPool| [(); 2].map(|()| (readers.reader(), Vec::new()));
    let threads = Threads::for_storage(jobs);
    for_each_piece(&lens, CHUNK_LEN, threads, watch, init, compare, |index, _, count: u64| {
        differing[index] += count;
    })?;
    for ((tensor, _), differing) in to_compare.iter().zip(differing) {
        let total = tensor.range().len / element_bytes(*tensor) as u64;
        if differing == 0 {
            found.same += 1;
        } else {
            let difference = TensorDifference::Values { differing, total };
            found.tensors.insert(tensor.name().into(), difference);
        }
    }
    Ok(found)
}

/// Returns the size of an element in bytes, or 1 for dtypes smaller than a byte. The result divides
/// [`CHUNK_LEN`], so no element is in two chunks.
fn element_bytes(tensor: Tensor<'_>) -> usize {
    (tensor.dtype().bits() as usize / 8).max(1)
}

fn metadata(
    first: &Checkpoint,
    second: &Checkpoint,
) -> BTreeMap<String, (Option<String>, Option<String>)> {
    let (first, second) = (merged_metadata(first), merged_metadata(second));
    let keys: BTreeSet<&String> = first.keys().chain(second.keys()).collect();
    let differing = keys.into_iter().filter(|key| first.get(*key) != second.get(*key));
    differing
        .map(|key| (key.clone(), (first.get(key).cloned(), second.get(key).cloned())))
        .collect()
}
