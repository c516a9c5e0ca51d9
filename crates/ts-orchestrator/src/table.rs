// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors whose rows are read one by one, such as embeddings.

use std::ops::Range;

use ts_format::{ByteRange, ChunkPart, TensorMeta};

use crate::unit::{Access, Phase, Unit, UnitTensor};

/// The number of rows that the name of a selection lists.
const NAMED_ROWS: usize = 3;

/// A tensor whose rows [`Engine::gather`](crate::Engine::gather) reads, such as an embedding.
///
/// A table is not a unit: between two calls, it takes only the memory of cached rows. The same
/// tensor can also be part of a unit.
#[derive(Debug, Clone)]
pub struct Table {
    tensor: UnitTensor,
    rows: u64,
}

/// The index of a table among the tables of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId(pub u32);

impl TableId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl Table {
    /// Creates a table from a tensor whose first dimension is the row.
    ///
    /// Returns `None` if the tensor has no dimension or no bytes, or if its rows are not whole
    /// bytes.
    pub fn new(tensor: UnitTensor) -> Option<Self> {
        let rows = *tensor.entry.meta.shape.first()?;
        let bytes: u64 = tensor.entry.parts.iter().map(|part| part.len).sum();
        (rows > 0 && bytes > 0 && bytes.is_multiple_of(rows)).then_some(Self { tensor, rows })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the size of a row, in bytes.
    pub fn row_bytes(&self) -> u64 {
        self.tensor.entry.parts.iter().map(|part| part.len).sum::<u64>() / self.rows
    }

    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        &self.tensor.name
    }

    /// Returns the dtype and the shape of the tensor.
    pub fn meta(&self) -> &TensorMeta {
        &self.tensor.entry.meta
    }

    /// Returns the whole tensor.
    pub fn tensor(&self) -> &UnitTensor {
        &self.tensor
    }

    /// Returns a unit that contains these rows, in this order. Rows with `true` and rows with
    /// `false` in `cached` are not in the same range.
    pub(crate) fn select(&self, rows: &[u64], cached: &[bool]) -> Unit {
        let flagged: Vec<(u64, bool)> = rows.iter().copied().zip(cached.iter().copied()).collect();
        let runs = flagged.chunk_by(|a, b| a.0 + 1 == b.0 && a.1 == b.1);
        let ranges = runs.map(|run| run[0].0..run[0].0 + run.len() as u64);
        self.unit(ranges, &names(rows.iter()))
    }

    /// Returns a unit that contains the rows of these ranges, in this order.
    pub(crate) fn select_ranges(&self, ranges: &[Range<u64>]) -> Unit {
        let named = ranges.iter().map(|rows| format!("{}..{}", rows.start, rows.end));
        self.unit(ranges.iter().cloned(), &names(named))
    }

    fn unit(&self, ranges: impl Iterator<Item = Range<u64>>, rows: &str) -> Unit {
        let row_bytes = self.row_bytes();
        let (mut parts, mut chunks): (Vec<ByteRange>, _) = (Vec::new(), Vec::new());
        let mut entry = self.tensor.entry.clone();
        entry.meta.shape[0] = 0;
        for range in ranges.filter(|range| !range.is_empty()) {
            let count = range.end - range.start;
            entry.meta.shape[0] += count;
            self.slice(range.start * row_bytes, count * row_bytes, &mut parts, &mut chunks);
        }
        entry.parts = parts;
        let (name, phase, digest) = (self.tensor.name.clone(), Phase::At(0), None);
        let tensor = UnitTensor { name, entry, phase, digest, chunks };
        let name = format!("{}[{rows}]", self.tensor.name);
        Unit::new(name, vec![tensor]).with_access(Access::Routed)
    }

    /// Appends the ranges and the chunks of `len` bytes from byte `begin` of the tensor.
    fn slice(&self, begin: u64, len: u64, parts: &mut Vec<ByteRange>, chunks: &mut Vec<ChunkPart>) {
        let overlap = |at: u64, part_len: u64| {
            let (first, last) = (begin.max(at), (begin + len).min(at + part_len));
            (first < last).then(|| (first - at, last - first))
        };
        let (mut at, mut decoded_at) = (0, 0);
        let mut stored = self.tensor.chunks.iter();
        for part in &self.tensor.entry.parts {
            if let Some((skip, len)) = overlap(at, part.len) {
                parts.push(ByteRange { offset: part.offset + skip, len, ..*part });
            }
            at += part.len;
            if !part.is_virtual() {
                decoded_at = at;
                continue;
            }
            while decoded_at < at {
                let chunk = stored.next().expect("`Sizing::new` checked the chunks");
                let chunk_len = u64::from(chunk.len);
                if let Some((skip, len)) = overlap(decoded_at, chunk_len) {
                    // Both fit, because they are parts of a length that fits.
                    let (skip, len) = (chunk.skip + skip as u32, len as u32);
                    chunks.push(ChunkPart { skip, len, ..*chunk });
                }
                decoded_at += chunk_len;
            }
        }
    }
}

/// Lists the first of these rows or ranges.
fn names(rows: impl ExactSizeIterator<Item = impl ToString>) -> String {
    let more = if rows.len() > NAMED_ROWS { ", ..." } else { "" };
    let named: Vec<_> = rows.take(NAMED_ROWS).map(|row| row.to_string()).collect();
    format!("{}{more}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use ts_format::{Dtype, FileId, TensorEntry};

    use super::*;

    fn table(parts: &[(u64, u64)], rows: u64) -> Option<Table> {
        let parts = parts.iter().map(|&(offset, len)| ByteRange { file: FileId(0), offset, len });
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![rows, 4] };
        let entry = TensorEntry { meta, parts: parts.collect() };
        let (digest, chunks) = (None, Vec::new());
        let (name, phase) = ("w".into(), Phase::Mapped);
        Table::new(UnitTensor { name, entry, phase, digest, chunks })
    }

    #[test]
    fn consecutive_rows_are_one_range() {
        let unit = table(&[(100, 40)], 10).unwrap().select(&[2, 3, 4, 7, 0, 1], &[false; 6]);
        let parts: Vec<_> = unit.tensors[0].entry.parts.iter().map(|p| (p.offset, p.len)).collect();
        assert_eq!(parts, [(108, 12), (128, 4), (100, 8)]);
        assert_eq!(
            (unit.name.as_str(), unit.tensors[0].entry.meta.shape[0]),
            ("w[2, 3, 4, ...]", 6)
        );
    }

    #[test]
    fn a_row_may_span_ranges_of_the_file() {
        let unit = table(&[(100, 6), (300, 6)], 3).unwrap().select(&[1], &[false]);
        let parts: Vec<_> = unit.tensors[0].entry.parts.iter().map(|p| (p.offset, p.len)).collect();
        assert_eq!(parts, [(104, 2), (300, 2)]);
        assert_eq!(unit.name, "w[1]");
    }

    #[test]
    fn rows_are_whole_bytes() {
        assert!(table(&[(0, 41)], 10).is_none());
        assert!(table(&[(0, 0)], 10).is_none());
        assert!(table(&[(0, 40)], 0).is_none());
    }
}
