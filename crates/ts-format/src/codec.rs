// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a chunk of a tensor's bytes is kept: as it is, or by a codec.

use std::fmt;

use twox_hash::XxHash3_64;
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx};

use crate::{Dtype, split};

/// How bytes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// As they are.
    Raw,
    /// An LZ4 block: fast, and of use where bytes repeat, as in masks and indices; not in trained
    /// weights.
    Lz4,
    /// A zstd frame.
    Zstd,
    /// Floats taken apart into planes of bytes, of which those with structure are zstd frames.
    Split,
    /// A zlib stream, for those who need one.
    Zlib,
}

impl Codec {
    /// All codecs, in the order of their codes.
    pub const ALL: &'static [Codec] =
        &[Codec::Raw, Codec::Lz4, Codec::Zstd, Codec::Split, Codec::Zlib];

    /// The name that users choose it by.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Raw => "raw",
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
            Codec::Split => "split",
            Codec::Zlib => "zlib",
        }
    }

    /// The codec with this name.
    pub fn from_name(name: &str) -> Option<Codec> {
        Self::ALL.iter().copied().find(|codec| codec.name() == name)
    }

    /// Its code in `.ts` files: its place in the list, for ever.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Codec> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The levels it has, from the fastest to the smallest result, and the usual one; `None` where
    /// there is no choice.
    pub const fn levels(self) -> Option<(std::ops::RangeInclusive<i32>, i32)> {
        match self {
            Codec::Raw | Codec::Lz4 | Codec::Split => None,
            Codec::Zstd => Some((-7..=22, 3)),
            Codec::Zlib => Some((0..=9, 6)),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The width in bytes of the floats that a tensor of this type is made of, if [`Codec::Split`]
/// takes it.
pub(crate) fn float_width(dtype: Dtype) -> Option<u8> {
    match dtype {
        Dtype::F8_E5M2 | Dtype::F8_E4M3 | Dtype::F8_E4M3Fnuz | Dtype::F8_E5M2Fnuz => Some(1),
        Dtype::F16 | Dtype::BF16 => Some(2),
        Dtype::F32 | Dtype::C64 => Some(4),
        Dtype::F64 => Some(8),
        _ => None,
    }
}

/// What decoding works with, between one chunk and the next. One for each thread; holds at most
/// [`Scratch::BYTES`].
#[derive(Default)]
pub struct Scratch {
    zstd: Option<DCtx<'static>>,
    planes: Vec<u8>,
}

impl Scratch {
    /// The most memory that one takes, in bytes: the planes of a chunk, and a zstd decoder.
    pub const BYTES: usize = (1 << 20) + (256 << 10);

    /// What it takes now.
    pub fn bytes(&self) -> usize {
        self.planes.capacity() + self.zstd.as_ref().map_or(0, DCtx::sizeof)
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scratch")
    }
}

/// Why a chunk cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a chunk of {codec}: {reason}")]
pub struct DecodeError {
    /// What it should have been.
    pub codec: Codec,
    /// What is wrong with it.
    pub reason: String,
}

/// Decodes `src`, a chunk kept by `codec`, into `dst`, which is as long as the chunk was. `width`
/// is that of the floats of [`Codec::Split`], in bytes; for other codecs it is nothing. Allocates
/// nothing once `scratch` has been used, whatever `src` says.
///
/// # Errors
/// [`DecodeError`] when `src` is not such a chunk, or one of another length. `dst` then has any
/// bytes.
pub fn decode_chunk(
    codec: Codec,
    width: u8,
    src: &[u8],
    dst: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), DecodeError> {
    let wrong = |reason: String| DecodeError { codec, reason };
    let Scratch { zstd, planes } = scratch;
    let zstd = zstd.get_or_insert_with(DCtx::create);
    let len = match codec {
        Codec::Raw => {
            if src.len() == dst.len() {
                dst.copy_from_slice(src);
            }
            src.len()
        }
        Codec::Lz4 => {
            lz4_flex::block::decompress_into(src, dst).map_err(|e| wrong(e.to_string()))?
        }
        Codec::Zstd => zstd
            .decompress(dst, src)
            .map_err(|code| wrong(zstd_safe::get_error_name(code).into()))?,
        Codec::Zlib => inflate(src, dst).map_err(wrong)?,
        Codec::Split => {
            let width = usize::from(width);
            if !split::WIDTHS.contains(&width) || !dst.len().is_multiple_of(width) {
                return Err(wrong(format!("{} bytes are no floats of {width} bytes", dst.len())));
            }
            split::decode(src, width, zstd, planes, dst).map_err(wrong)?;
            dst.len()
        }
    };
    if len != dst.len() {
        return Err(wrong(format!("it holds {len} bytes, not {}", dst.len())));
    }
    Ok(())
}

fn inflate(src: &[u8], dst: &mut [u8]) -> Result<usize, String> {
    use flate2::{Decompress, FlushDecompress, Status};
    let mut state = Decompress::new(true);
    match state.decompress(src, dst, FlushDecompress::Finish) {
        Ok(Status::StreamEnd) if state.total_in() == src.len() as u64 => {
            Ok(state.total_out() as usize)
        }
        Ok(Status::StreamEnd) => Err("bytes behind its end".into()),
        Ok(_) => Err("it does not end where it should".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// What a writer is to do with tensors' bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// Keep them as they are: such tensors can be mapped, and read straight to where they belong.
    #[default]
    None,
    /// For each tensor what makes it smaller: floats are split, wide integers and masks go through
    /// zstd. It stays as it is where that saves less than 3% of its first 16 MiB, and if it is of
    /// bytes or of narrower integers, which quantised weights are made of. The same tensor is
    /// always kept the same way.
    Auto,
    /// This codec, at this level, for all that it can take; `None` is the codec's usual level.
    By(Codec, Option<i32>),
}

impl Compression {
    /// Of a gain smaller than one part in so many [`Auto`](Self::Auto) makes nothing.
    const WORTH: u64 = 32;

    /// What users call `raw`, `auto`, or by the name of a codec, at this level.
    ///
    /// # Errors
    /// The names there are; that there are no levels. Whether a codec has the level is found out
    /// when it is used.
    pub fn named(name: &str, level: Option<i32>) -> Result<Self, String> {
        match (name, Codec::from_name(name), level) {
            ("auto" | "raw", _, Some(level)) => {
                Err(format!("{name} has no levels, and so no level {level}"))
            }
            ("auto", ..) => Ok(Compression::Auto),
            (_, Some(Codec::Raw), _) => Ok(Compression::None),
            (_, Some(codec), level) => Ok(Compression::By(codec, level)),
            (_, None, _) => {
                let names: Vec<_> = Codec::ALL.iter().map(|codec| codec.name()).collect();
                Err(format!(
                    "there is no codec {name:?}: it is auto or one of {}",
                    names.join(", ")
                ))
            }
        }
    }

    /// The codec for a tensor of this type, if it may be compressed.
    pub fn codec(self, dtype: Dtype) -> Option<Codec> {
        let floats = float_width(dtype).is_some();
        match (self, dtype) {
            (Compression::None | Compression::By(Codec::Raw, _), _) => None,
            (Compression::By(Codec::Split, _), _) => floats.then_some(Codec::Split),
            (Compression::By(codec, _), _) => Some(codec),
            (Compression::Auto, _) if floats => Some(Codec::Split),
            (Compression::Auto, Dtype::Bool | Dtype::I16 | Dtype::U16 | Dtype::I32) => {
                Some(Codec::Zstd)
            }
            (Compression::Auto, Dtype::U32 | Dtype::I64 | Dtype::U64) => Some(Codec::Zstd),
            (Compression::Auto, _) => None,
        }
    }

    /// The level that was asked for.
    pub fn level(self) -> Option<i32> {
        match self {
            Compression::By(_, level) => level,
            Compression::None | Compression::Auto => None,
        }
    }

    /// Whether a tensor is kept compressed whose first `raw` bytes, at most 16 MiB, came to
    /// `stored`.
    pub fn is_worth(self, raw: u64, stored: u64) -> bool {
        self != Compression::Auto || stored <= raw - raw.div_ceil(Self::WORTH)
    }
}

/// A chunk that was encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// How it is kept.
    pub codec: Codec,
    /// See [`decode_chunk`].
    pub width: u8,
    /// Bytes it takes.
    pub len: usize,
    /// Bytes it is of.
    pub raw_len: usize,
    /// XXH3 with 64 bits of the bytes it takes,
    pub sum: u64,
    /// and of those it is of.
    pub raw_sum: u64,
}

/// Encodes chunks. One for each thread.
pub struct Encoder {
    codec: Codec,
    zstd: Option<CCtx<'static>>,
    split: Option<split::Coder>,
    level: i32,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Encoder({}, level {})", self.codec, self.level)
    }
}

impl Encoder {
    /// An encoder at a level that the codec has, or at its usual one.
    ///
    /// # Errors
    /// The levels there are.
    pub fn new(codec: Codec, level: Option<i32>) -> Result<Self, String> {
        let level = match (codec.levels(), level) {
            (Some((levels, _)), Some(level)) if !levels.contains(&level) => {
                let (first, last) = levels.into_inner();
                return Err(format!("{codec} has no level {level}: they are {first} to {last}"));
            }
            (None, Some(level)) => {
                return Err(format!("{codec} has no levels, and so no level {level}"));
            }
            (levels, level) => level.or(levels.map(|(_, usual)| usual)).unwrap_or(0),
        };
        let zstd = (codec == Codec::Zstd).then(|| {
            let mut context = CCtx::create();
            let set = context.set_parameter(CParameter::CompressionLevel(level));
            set.expect("the level was checked");
            context
        });
        let split = (codec == Codec::Split).then(split::Coder::new);
        Ok(Self { codec, zstd, split, level })
    }

    /// Appends a chunk of a tensor of `dtype` to `out`, by this codec, or as it is where that is no
    /// larger.
    pub fn encode(&mut self, dtype: Dtype, raw: &[u8], out: &mut Vec<u8>) -> Encoded {
        let begin = out.len();
        let (codec, width) = self.append(dtype, raw, out);
        let len = out.len() - begin;
        let raw_sum = XxHash3_64::oneshot(raw);
        let sum = if codec == Codec::Raw { raw_sum } else { XxHash3_64::oneshot(&out[begin..]) };
        Encoded { codec, width, len, raw_len: raw.len(), sum, raw_sum }
    }

    fn append(&mut self, dtype: Dtype, raw: &[u8], out: &mut Vec<u8>) -> (Codec, u8) {
        let begin = out.len();
        let width = if self.codec == Codec::Split { float_width(dtype).unwrap_or(0) } else { 0 };
        match (self.codec, &mut self.zstd, &mut self.split) {
            (Codec::Split, _, Some(split)) if width > 0 => {
                split.encode(raw, usize::from(width), out);
            }
            (Codec::Zstd, Some(zstd), _) => {
                out.resize(begin + zstd_safe::compress_bound(raw.len()), 0);
                let len = zstd
                    .compress2(&mut out[begin..], raw)
                    .expect("there is room for what it may come to");
                out.truncate(begin + len);
            }
            (Codec::Lz4, ..) => {
                out.resize(begin + lz4_flex::block::get_maximum_output_size(raw.len()), 0);
                let len = lz4_flex::block::compress_into(raw, &mut out[begin..]);
                out.truncate(begin + len.expect("there is room for what it may come to"));
            }
            (Codec::Zlib, ..) => deflate(raw, self.level, out),
            _ => out.extend(raw),
        }
        if out.len() - begin < raw.len() {
            return (self.codec, width);
        }
        out.truncate(begin);
        out.extend(raw);
        (Codec::Raw, 0)
    }
}

fn deflate(raw: &[u8], level: i32, out: &mut Vec<u8>) {
    use flate2::{Compress, Compression, FlushCompress, Status};
    let mut state = Compress::new(Compression::new(level.unsigned_abs()), true);
    loop {
        out.reserve(raw.len() / 2 + 1024);
        let rest = &raw[state.total_in() as usize..];
        match state.compress_vec(rest, out, FlushCompress::Finish) {
            Ok(Status::StreamEnd) => return,
            Ok(_) => {}
            Err(error) => unreachable!("compressing has no bad input: {error}"),
        }
    }
}
