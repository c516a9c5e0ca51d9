// SPDX-License-Identifier: MIT OR Apache-2.0
//! In what two checkpoints differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use ts_format::{CHUNK_LEN, Tensor, TensorMeta};

use crate::convert::merged_metadata;
use crate::pieces::over_pieces;
use crate::read::{Reader, Readers};
use crate::{Checkpoint, Error, Watch};

/// In what two checkpoints differ, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Difference {
    /// Metadata: what the first says, and the second.
    pub metadata: BTreeMap<String, (Option<String>, Option<String>)>,
    /// Tensors.
    pub tensors: BTreeMap<String, TensorDifference>,
    /// How many tensors are the same, bit for bit.
    pub same: usize,
}

/// In what two tensors differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorDifference {
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second has it.
    OnlySecond,
    /// They are of other types or shapes.
    Meta(TensorMeta, TensorMeta),
    /// They have other values.
    Values {
        /// Elements that differ; of types that take less than a byte, bytes.
        differing: u64,
        /// Of so many.
        total: u64,
    },
}

impl Difference {
    /// Whether there is none.
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

/// Compares two checkpoints, whatever formats and files they are in, bit for bit, on `jobs`
/// threads, 0 for as many as there are cores. Tensors that both have fingerprints of are read only
/// if these differ.
///
/// # Errors
/// As [`Checkpoint::open`]; [`Error::Io`], [`Error::Corrupt`], [`Error::Interrupted`].
pub fn diff(
    first: &Path,
    second: &Path,
    jobs: usize,
    watch: &mut Watch<'_>,
) -> Result<Difference, Error> {
    let (first, second) = (Checkpoint::open(first)?, Checkpoint::open(second)?);
    let mut found = Difference { metadata: metadata(&first, &second), ..Difference::default() };
    let mut unsure: Vec<(Tensor<'_>, Tensor<'_>)> = Vec::new();
    let only_second =
        second.catalog().tensors().filter(|t| first.catalog().tensor(t.name()).is_none());
    let only_second =
        only_second.map(|tensor| (tensor.name().into(), TensorDifference::OnlySecond));
    found.tensors.extend(only_second);
    for a in first.catalog().tensors_by_place() {
        let difference = match second.catalog().tensor(a.name()) {
            None => TensorDifference::OnlyFirst,
            Some(b) if a.meta() != b.meta() => TensorDifference::Meta(a.meta(), b.meta()),
            Some(b) if a.fingerprint().is_some() && a.fingerprint() == b.fingerprint() => {
                found.same += 1;
                continue;
            }
            Some(b) => {
                unsure.push((a, b));
                continue;
            }
        };
        found.tensors.insert(a.name().into(), difference);
    }
    let lens: Vec<u64> = unsure.iter().map(|(a, _)| a.range().len).collect();
    let mut differing = vec![0; unsure.len()];
    let compare = |this: &mut [(Reader, Vec<u8>); 2], index: usize, begin: u64, len: usize| {
        let (a, b) = unsure[index];
        for ((checkpoint, tensor), (reader, bytes)) in
            [(&first, a), (&second, b)].into_iter().zip(&mut *this)
        {
            bytes.resize(len, 0);
            reader.read_checked(checkpoint, tensor, begin, bytes)?;
        }
        let [(_, a), (_, b)] = this;
        let size = element_bytes(unsure[index].0);
        let pairs = a.chunks(size).zip(b.chunks(size));
        Ok(if a == b { 0 } else { pairs.filter(|(a, b)| a != b).count() as u64 })
    };
    let begin = |readers: &Readers| [(); 2].map(|()| (readers.reader(), Vec::new()));
    over_pieces(&lens, CHUNK_LEN, jobs, watch, begin, compare, |index, _, count: u64| {
        differing[index] += count;
    })?;
    for ((tensor, _), differing) in unsure.iter().zip(differing) {
        let total = tensor.range().len / element_bytes(*tensor) as u64;
        match differing {
            0 => found.same += 1,
            _ => drop(
                found
                    .tensors
                    .insert(tensor.name().into(), TensorDifference::Values { differing, total }),
            ),
        }
    }
    Ok(found)
}

/// Bytes of what is counted. Chunks have a whole number of them.
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
