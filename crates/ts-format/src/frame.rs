// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes zstd frames of Huffman-coded literals apart, so that other code can decode their streams
//! independently of each other. The frames are described in RFC 8878, to whose sections the
//! functions refer.

use std::ops::Range;

/// The longest codeword of literals, in bits (4.2.1).
pub const MAX_CODE_BITS: u32 = 11;

/// Frames with a new code for fewer bytes than these on average are refused, after the first 64.
const LEAST_BYTES_OF_CODE: usize = 1024;
const MAGIC: [u8; 4] = 0xFD2F_B528u32.to_le_bytes();

/// A Huffman code of bytes.
///
/// A symbol of weight `w > 0` has a codeword of `max_bits + 1 - w` bits. Codewords are assigned in
/// increasing order, to the symbols by increasing weight, and by value among equal weights.
#[derive(Clone, PartialEq, Eq)]
pub struct HuffmanCode {
    /// The weight of each symbol. Symbols of weight 0 have no codeword.
    pub weights: [u8; 256],
    /// The length of the longest codeword in bits, at most [`MAX_CODE_BITS`].
    pub max_bits: u32,
}

impl std::fmt::Debug for HuffmanCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HuffmanCode").field("max_bits", &self.max_bits).finish_non_exhaustive()
    }
}

/// A run of bytes, and how they are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The number of bytes.
    pub count: usize,
    /// How they are stored.
    pub content: RunContent,
}

/// How the bytes of a [`Run`] are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunContent {
    /// As the bytes in this range.
    Stored(Range<usize>),
    /// All are this byte.
    Repeated(u8),
    /// As codewords. They are read backwards, from the bit below the highest 1 in the last byte of
    /// `stream`.
    Huffman {
        /// The range of the codewords.
        stream: Range<usize>,
        /// The index of their code.
        code: usize,
    },
}

/// Takes a frame apart, which is at `at` in `bytes`. Appends its codes to `codes`. Returns the runs
/// of its content, whose ranges and codes are those of `bytes` and `codes`. Returns `None` if the
/// frame is invalid or has matches.
pub(crate) fn runs(
    bytes: &[u8],
    at: Range<usize>,
    codes: &mut Vec<HuffmanCode>,
) -> Option<Vec<Run>> {
    let (mut rest, end) = (frame_content(bytes.get(at.clone())?, at.start)?, at.end);
    let (mut runs, mut code) = (Vec::new(), None);
    loop {
        // A block (3.1.1.2).
        let header = little_endian(bytes.get(rest..rest + 3)?) as usize;
        let (is_last, kind, len) = (header & 1 == 1, header >> 1 & 3, header >> 3);
        rest += 3;
        let stored = if kind == 1 { 1 } else { len };
        let content = rest..rest.checked_add(stored).filter(|&to| to <= end)?;
        rest = content.end;
        match kind {
            // The last block may be empty. Others of no bytes would only cost memory.
            0 | 1 if len == 0 && !is_last => return None,
            0 => runs.push(Run { count: len, content: RunContent::Stored(content) }),
            1 => {
                let content = RunContent::Repeated(bytes[content.start]);
                runs.push(Run { count: len, content });
            }
            2 => literals(bytes, content, codes, &mut code, &mut runs)?,
            _ => return None,
        }
        if is_last {
            break;
        }
    }
    // A checksum of the content may follow. Frames of this crate have none.
    (rest == end).then_some(runs)
}

/// Returns where the blocks of a frame begin (3.1.1.1). The frame begins at `at`.
fn frame_content(frame: &[u8], at: usize) -> Option<usize> {
    let descriptor = *frame.strip_prefix(&MAGIC)?.first()?;
    let is_single_segment = descriptor >> 5 & 1 == 1;
    let (has_checksum, dictionary_id) = (descriptor & 4 != 0, descriptor & 3);
    let content_len = match descriptor >> 6 {
        0 => usize::from(is_single_segment),
        flag => 1 << flag,
    };
    let header = MAGIC.len() + 1 + usize::from(!is_single_segment) + content_len;
    (!has_checksum && dictionary_id == 0).then_some(at + header)
}

/// Takes the literals of a block apart (3.1.1.3.1). `code` is the index of the latest code of the
/// frame.
fn literals(
    bytes: &[u8],
    block: Range<usize>,
    codes: &mut Vec<HuffmanCode>,
    code: &mut Option<usize>,
    runs: &mut Vec<Run>,
) -> Option<()> {
    let content = &bytes[block.clone()];
    let first = *content.first()?;
    // A description of a code takes much more memory here than in the frame.
    if codes.len() > bytes.len() / LEAST_BYTES_OF_CODE + 64 {
        return None;
    }
    let (kind, format) = (first & 3, first >> 2 & 3);
    let header = little_endian(content.get(..content.len().min(5))?);
    if kind < 2 {
        let (header_len, shift) = match format {
            0 | 2 => (1, 3),
            1 => (2, 4),
            _ => (3, 4),
        };
        let mask = (1 << (8 * header_len)) - 1;
        let count = ((header & mask) >> shift) as usize;
        let start = block.start + header_len;
        let stored = start..start + if kind == 0 { count } else { 1 };
        let content = match kind {
            0 => RunContent::Stored(stored.clone()),
            _ => RunContent::Repeated(*content.get(header_len)?),
        };
        runs.push(Run { count, content });
        return ends_without_matches(bytes, stored.end, block.end);
    }
    let (header_len, size_bits) = match format {
        0 | 1 => (3, 10),
        2 => (4, 14),
        _ => (5, 18),
    };
    let mask = (1 << size_bits) - 1;
    let (count, len) = ((header >> 4 & mask) as usize, (header >> (4 + size_bits) & mask) as usize);
    let mut at = block.start + header_len;
    let end = at + len;
    if end > block.end {
        return None;
    }
    if kind == 2 {
        let (new, tree_len) = huffman_code(&bytes[at..end])?;
        *code = Some(codes.len());
        codes.push(new);
        at += tree_len;
    }
    let code = (*code)?;
    let mut push = |count, stream: Range<usize>| {
        let is_valid = stream.end <= end && bytes.get(stream.clone())?.last()? != &0;
        runs.push(Run { count, content: RunContent::Huffman { stream, code } });
        is_valid.then_some(())
    };
    if format == 0 {
        push(count, at..end)?;
        return ends_without_matches(bytes, end, block.end);
    }
    // Four streams, after a table of the lengths of three (3.1.1.3.1.6).
    let lens = bytes.get(at..at + 6).filter(|_| at + 6 <= end)?.as_chunks::<2>().0;
    let lens = [lens[0], lens[1], lens[2]].map(|len| usize::from(u16::from_le_bytes(len)));
    at += 6;
    let each = count.div_ceil(4);
    let last = count.checked_sub(3 * each)?;
    for len in lens {
        push(each, at..at + len)?;
        at += len;
    }
    push(last, at.min(end)..end)?;
    ends_without_matches(bytes, end, block.end)
}

/// Checks that a block has no sequences after its literals, which end at `at` (3.1.1.3.2.1).
fn ends_without_matches(bytes: &[u8], at: usize, end: usize) -> Option<()> {
    (at + 1 == end && bytes[at] == 0).then_some(())
}

/// Reads a code, and returns how many bytes its description has (4.2.1).
fn huffman_code(bytes: &[u8]) -> Option<(HuffmanCode, usize)> {
    let (&first, rest) = bytes.split_first()?;
    let (mut weights, len) = match first {
        0..128 => {
            let len = usize::from(first);
            (fse_weights(rest.get(..len)?)?, 1 + len)
        }
        _ => {
            let count = usize::from(first) - 127;
            let pairs = rest.get(..count.div_ceil(2))?;
            let weights = pairs.iter().flat_map(|pair| [pair >> 4, pair & 15]);
            (weights.take(count).collect(), 1 + count.div_ceil(2))
        }
    };
    let sum = weights.iter().try_fold(0u32, |sum, &weight| match weight {
        0 => Some(sum),
        weight => (u32::from(weight) <= MAX_CODE_BITS).then(|| sum + (1 << (weight - 1))),
    })?;
    let max_bits = sum.checked_ilog2()? + 1;
    let left = (1 << max_bits) - sum;
    if max_bits > MAX_CODE_BITS || !left.is_power_of_two() || weights.len() > 255 {
        return None;
    }
    weights.push(left.ilog2() as u8 + 1);
    let mut code = HuffmanCode { weights: [0; 256], max_bits };
    code.weights[..weights.len()].copy_from_slice(&weights);
    Some((code, len))
}

/// A state of the decoder of weights.
#[derive(Clone, Copy, Default)]
struct State {
    symbol: u8,
    bits: u32,
    base: usize,
}

/// Decodes the weights of a Huffman code (4.2.1.2).
fn fse_weights(bytes: &[u8]) -> Option<Vec<u8>> {
    let (log, counts, len) = fse_counts(bytes)?;
    let table = fse_table(log, &counts)?;
    let mut bits = Backwards::new(&bytes[len..])?;
    let mut states = [bits.read(log) as usize, bits.read(log) as usize];
    let mut weights = Vec::new();
    for turn in 0.. {
        let state = table[states[turn % 2]];
        weights.push(state.symbol);
        states[turn % 2] = state.base + bits.read(state.bits) as usize;
        if bits.is_beyond_start() {
            weights.push(table[states[(turn + 1) % 2]].symbol);
            break;
        }
        if weights.len() > 255 {
            return None;
        }
    }
    Some(weights)
}

/// Reads a table of probabilities (4.1.1): its accuracy log, the counts, and the length.
fn fse_counts(bytes: &[u8]) -> Option<(u32, Vec<i32>, usize)> {
    let mut at = 0;
    let mut read = |bits: u32, consumed: &dyn Fn(u32) -> u32| {
        let window = bytes.get(at / 8..)?;
        let window = little_endian(&window[..window.len().min(4)]);
        let value = (window >> (at % 8)) as u32 & ((1 << bits) - 1);
        at += consumed(value) as usize;
        Some((value, at))
    };
    let log = read(4, &|_| 4)?.0 + 5;
    if log > 6 {
        return None;
    }
    let (mut counts, mut end) = (Vec::new(), 0);
    let (mut remaining, mut threshold, mut bits) = ((1 << log) + 1, 1 << log, log + 1);
    while remaining > 1 {
        let short = 2 * threshold - 1 - remaining;
        let is_short = |value: u32| ((value as i32) & (threshold - 1)) < short;
        let (value, at) = read(bits, &|value| if is_short(value) { bits - 1 } else { bits })?;
        let value = value as i32;
        let count = match is_short(value as u32) {
            true => value & (threshold - 1),
            false if value >= threshold => value - short,
            false => value,
        } - 1;
        end = at;
        remaining -= count.abs();
        counts.push(count);
        let mut zeros = if count == 0 { 3 } else { 0 };
        while zeros == 3 {
            (zeros, end) = read(2, &|_| 2)?;
            counts.extend((0..zeros).map(|_| 0));
        }
        if remaining < 1 || counts.len() > 256 {
            return None;
        }
        while remaining < threshold {
            bits -= 1;
            threshold >>= 1;
        }
    }
    let len = end.div_ceil(8);
    (len <= bytes.len()).then_some((log, counts, len))
}

/// Builds the table of states (4.1.1).
fn fse_table(log: u32, counts: &[i32]) -> Option<Vec<State>> {
    let size = 1usize << log;
    let mut table = vec![State::default(); size];
    let mut free = size;
    for (symbol, _) in counts.iter().enumerate().filter(|(_, count)| **count == -1) {
        free = free.checked_sub(1)?;
        table[free].symbol = symbol as u8;
    }
    let (step, mut at) = ((size >> 1) + (size >> 3) + 3, 0);
    for (symbol, &count) in counts.iter().enumerate() {
        for _ in 0..count.max(0) {
            table[at].symbol = symbol as u8;
            loop {
                at = (at + step) % size;
                if at < free {
                    break;
                }
            }
        }
    }
    let mut next: Vec<usize> = counts.iter().map(|count| count.unsigned_abs() as usize).collect();
    for state in &mut table {
        let next = next.get_mut(usize::from(state.symbol)).filter(|next| **next > 0)?;
        state.bits = log - next.ilog2();
        state.base = (*next << state.bits) - size;
        *next += 1;
    }
    Some(table)
}

/// Reads bits backwards, from below the highest 1 in the last byte (4.1). Bits before the start are
/// 0.
struct Backwards<'a> {
    bytes: &'a [u8],
    /// The number of bits before the next one to read.
    left: isize,
}

impl<'a> Backwards<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let padding = bytes.last()?.checked_ilog2()? as usize;
        Some(Self { bytes, left: (8 * (bytes.len() - 1) + padding) as isize })
    }

    fn read(&mut self, count: u32) -> u32 {
        (0..count).fold(0, |value, _| {
            self.left -= 1;
            let at = usize::try_from(self.left).ok();
            let bit = at.map_or(0, |at| self.bytes[at / 8] >> (at % 8) & 1);
            value << 1 | u32::from(bit)
        })
    }

    fn is_beyond_start(&self) -> bool {
        self.left < 0
    }
}

/// Returns at most 8 bytes as a number.
fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Decodes runs, one bit at a time.
    pub(crate) fn decode(bytes: &[u8], runs: &[Run], codes: &[HuffmanCode]) -> Vec<u8> {
        let mut out = Vec::new();
        for Run { count, content } in runs {
            match content {
                RunContent::Stored(range) => {
                    assert_eq!(range.len(), *count);
                    out.extend_from_slice(&bytes[range.clone()]);
                }
                RunContent::Repeated(byte) => out.resize(out.len() + count, *byte),
                RunContent::Huffman { stream, code } => {
                    let mut bits = Backwards::new(&bytes[stream.clone()]).unwrap();
                    let codewords = codewords(&codes[*code]);
                    out.extend((0..*count).map(|_| symbol(&codewords, &mut bits)));
                    assert_eq!(bits.left, 0, "all bits are read");
                }
            }
        }
        out
    }

    /// Returns the symbol of each codeword. The key is the number of its bits, and the bits.
    fn codewords(code: &HuffmanCode) -> HashMap<(u32, u32), u8> {
        let (mut codewords, mut next) = (HashMap::new(), 0);
        for weight in 1..=code.max_bits {
            for symbol in 0..=255u8 {
                if u32::from(code.weights[usize::from(symbol)]) == weight {
                    let len = code.max_bits + 1 - weight;
                    codewords.insert((len, next >> (weight - 1)), symbol);
                    next += 1 << (weight - 1);
                }
            }
        }
        codewords
    }

    fn symbol(codewords: &HashMap<(u32, u32), u8>, bits: &mut Backwards<'_>) -> u8 {
        let (mut word, mut len) = (0, 0);
        loop {
            (word, len) = (word << 1 | bits.read(1), len + 1);
            if let Some(&symbol) = codewords.get(&(len, word)) {
                return symbol;
            }
            assert!(len < 32, "each word begins with a codeword");
        }
    }
}
