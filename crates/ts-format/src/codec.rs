// SPDX-License-Identifier: MIT OR Apache-2.0
//! Codecs for the chunks of compressed tensors.

use std::fmt;

use twox_hash::XxHash3_64;
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx};

use crate::{Dtype, split};

/// A codec for chunks of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// No compression.
    Raw,
    /// An LZ4 block. It is fast and compresses repeated bytes well, as in masks and indices. It
    /// does not compress trained weights.
    Lz4,
    /// A zstd frame.
    Zstd,
    /// Floats, separated into planes of bytes. Each compressible plane is stored as a zstd frame.
    Split,
    /// A zlib stream.
    Zlib,
}

impl Codec {
    /// All codecs, in the order of their codes.
    pub const ALL: &'static [Codec] =
        &[Codec::Raw, Codec::Lz4, Codec::Zstd, Codec::Split, Codec::Zlib];

    /// Returns the name, such as `zstd`.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Raw => "raw",
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
            Codec::Split => "split",
            Codec::Zlib => "zlib",
        }
    }

    /// Returns the codec with this name, or `None` if the name is unknown.
    pub fn from_name(name: &str) -> Option<Codec> {
        Self::ALL.iter().copied().find(|codec| codec.name() == name)
    }

    /// Returns the code of the codec in `.ts` files. Codes are positions in the enum, so the order
    /// must never change.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Codec> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Returns the range of compression levels and the default level, or `None` if the codec has no
    /// levels. Higher levels are slower and usually compress better.
    pub const fn levels(self) -> Option<(std::ops::RangeInclusive<i32>, i32)> {
        match self {
            Codec::Raw | Codec::Lz4 | Codec::Split => None,
            Codec::Zstd => Some((-7..=22, 3)),
            Codec::Zlib => Some((0..=9, 6)),
        }
    }
}

impl Codec {
    /// Returns an error message if the codec does not have this level.
    fn check_level(self, level: Option<i32>) -> Result<(), String> {
        match (self.levels(), level) {
            (Some((levels, _)), Some(level)) if !levels.contains(&level) => {
                let (first, last) = levels.into_inner();
                Err(format!("invalid level {level} for codec {self} (expected {first} to {last})"))
            }
            (None, Some(level)) => Err(format!("codec {self} has no levels (got level {level})")),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the width in bytes of the floats in a tensor of this dtype (4 for `C64`), or `None` if
/// [`Codec::Split`] does not support the dtype.
pub(crate) fn float_width(dtype: Dtype) -> Option<u8> {
    match dtype {
        Dtype::F8_E5M2 | Dtype::F8_E4M3 | Dtype::F8_E4M3Fnuz | Dtype::F8_E5M2Fnuz => Some(1),
        Dtype::F16 | Dtype::BF16 | Dtype::C32 => Some(2),
        Dtype::F32 | Dtype::C64 => Some(4),
        Dtype::F64 | Dtype::C128 => Some(8),
        _ => None,
    }
}

/// Memory that [`decode_chunk`] reuses between calls, at most [`Scratch::BYTES`]. Each thread needs
/// its own `Scratch`.
#[derive(Default)]
pub struct Scratch {
    zstd: Option<DCtx<'static>>,
    planes: Vec<u8>,
}

impl Scratch {
    /// Maximum memory use in bytes: the planes of a chunk and a zstd decoder.
    pub const BYTES: usize = (1 << 20) + (256 << 10);

    /// Returns the current memory use in bytes.
    pub fn bytes(&self) -> usize {
        self.planes.capacity() + self.zstd.as_ref().map_or(0, DCtx::sizeof)
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scratch")
    }
}

/// The error of [`decode_chunk`] for a chunk that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {codec} chunk: {reason}")]
pub struct DecodeError {
    /// The codec of the chunk.
    pub codec: Codec,
    /// The reason why the chunk is invalid.
    pub reason: String,
}

/// Decodes a chunk from `src` into `dst`, which must have exactly the decoded length. `width` is
/// the width of the floats of [`Codec::Split`] in bytes; other codecs ignore it.
///
/// The function reuses the memory of `scratch`. [`Codec::Zlib`] also allocates a state of constant
/// size for each call. The size of allocations does not depend on the content of `src`.
///
/// # Errors
/// Returns [`DecodeError`] if `src` is invalid or decodes to another length, or if `width` is
/// invalid for [`Codec::Split`]. The content of `dst` is then unspecified.
pub fn decode_chunk(
    codec: Codec,
    width: u8,
    src: &[u8],
    dst: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), DecodeError> {
    let error = |reason: String| DecodeError { codec, reason };
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
            lz4_flex::block::decompress_into(src, dst).map_err(|e| error(e.to_string()))?
        }
        Codec::Zstd => zstd
            .decompress(dst, src)
            .map_err(|code| error(zstd_safe::get_error_name(code).into()))?,
        Codec::Zlib => inflate(src, dst).map_err(error)?,
        Codec::Split => {
            let width = usize::from(width);
            if !split::WIDTHS.contains(&width) || !dst.len().is_multiple_of(width) {
                return Err(error(format!(
                    "cannot decode {} bytes as floats of {width} bytes (expected a width of 1, 2, \
                     4 or 8 that divides the length)",
                    dst.len()
                )));
            }
            split::decode(src, width, zstd, planes, dst).map_err(error)?;
            dst.len()
        }
    };
    if len != dst.len() {
        return Err(error(format!("it decodes to {len} bytes (expected {})", dst.len())));
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
        Ok(Status::StreamEnd) => {
            let count = src.len() as u64 - state.total_in();
            Err(format!("{count} trailing bytes after the zlib stream"))
        }
        Ok(_) => Err(format!(
            "the zlib stream is truncated, or decodes to more than {} bytes",
            dst.len()
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// The compression that a writer applies to tensors.
///
/// ```
/// use ts_format::{Codec, Compression, Dtype};
///
/// let auto = Compression::parse("auto", None)?;
/// assert_eq!(auto.codec(Dtype::BF16), Some(Codec::Split));
/// assert_eq!(auto.codec(Dtype::U8), None);
/// assert_eq!(Compression::parse("auto", Some(9))?.level(Codec::Zstd), Some(9));
/// assert_eq!(Compression::parse("zstd", Some(9))?, Compression::Codec(Codec::Zstd, Some(9)));
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// No compression: tensors can be memory-mapped, and read directly to their destination.
    #[default]
    None,
    /// A codec chosen by dtype: [`Codec::Split`] for floats, [`Codec::Zstd`] for booleans and for
    /// integers of 16 bits or more. The dtypes of quantised weights stay uncompressed: 8-bit
    /// integers, packed dtypes and `F8_E8M0`. So does a tensor whose first 16 MiB shrink by less
    /// than 1/32. The choice is deterministic.
    Auto,
    /// Like [`Auto`](Self::Auto), with this level for [`Codec::Zstd`].
    AutoAt(i32),
    /// This codec at this level, for all dtypes that the codec supports. A level of `None` is the
    /// default level of the codec.
    Codec(Codec, Option<i32>),
}

impl Compression {
    /// [`Auto`](Self::Auto) compresses a tensor only if this saves at least 1/32.
    const MIN_SAVING: u64 = 32;

    /// Parses a compression: `auto` or the name of a codec, with an optional level. For `raw`,
    /// returns [`None`](Self::None).
    ///
    /// This function does not check whether a named codec has this level; [`Encoder::new`] does.
    ///
    /// # Errors
    /// Returns an error message if the name is unknown, if zstd does not have the level of `auto`,
    /// or if `raw` has a level.
    pub fn parse(name: &str, level: Option<i32>) -> Result<Self, String> {
        match (name, Codec::from_name(name), level) {
            ("raw", _, Some(level)) => {
                Err(format!("compression {name:?} has no levels (got level {level})"))
            }
            ("auto", _, Some(level)) => {
                Codec::Zstd.check_level(Some(level))?;
                Ok(Compression::AutoAt(level))
            }
            ("auto", ..) => Ok(Compression::Auto),
            (_, Some(Codec::Raw), _) => Ok(Compression::None),
            (_, Some(codec), level) => Ok(Compression::Codec(codec, level)),
            (_, None, _) => {
                let names: Vec<_> = Codec::ALL.iter().map(|codec| codec.name()).collect();
                Err(format!("unknown codec {name:?} (expected auto, {})", names.join(", ")))
            }
        }
    }

    /// Returns the codec for tensors of this dtype, or `None` if they stay uncompressed.
    pub fn codec(self, dtype: Dtype) -> Option<Codec> {
        let floats = float_width(dtype).is_some();
        match (self, dtype) {
            (Compression::None | Compression::Codec(Codec::Raw, _), _) => None,
            (Compression::Codec(Codec::Split, _), _) => floats.then_some(Codec::Split),
            (Compression::Codec(codec, _), _) => Some(codec),
            (Compression::Auto | Compression::AutoAt(_), _) if floats => Some(Codec::Split),
            (_, Dtype::Bool | Dtype::I16 | Dtype::U16 | Dtype::I32) => Some(Codec::Zstd),
            (_, Dtype::U32 | Dtype::I64 | Dtype::U64) => Some(Codec::Zstd),
            (Compression::Auto | Compression::AutoAt(_), _) => None,
        }
    }

    /// Returns the requested level for tensors that are compressed with this codec, if any.
    pub fn level(self, codec: Codec) -> Option<i32> {
        match self {
            Compression::Codec(_, level) => level,
            Compression::AutoAt(level) => codec.levels().map(|_| level),
            Compression::None | Compression::Auto => None,
        }
    }

    /// Returns whether to compress a tensor whose first `raw` bytes, at most 16 MiB, compress to
    /// `stored` bytes. Only [`Auto`](Self::Auto) and [`AutoAt`](Self::AutoAt) ever return false.
    pub fn is_worthwhile(self, raw: u64, stored: u64) -> bool {
        let is_auto = matches!(self, Compression::Auto | Compression::AutoAt(_));
        !is_auto || stored <= raw - raw.div_ceil(Self::MIN_SAVING)
    }
}

/// The description of an encoded chunk, without its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// The codec used. It is [`Codec::Raw`] if the encoder's codec does not support the dtype or
    /// does not make the chunk smaller.
    pub codec: Codec,
    /// Element width in bytes for [`Codec::Split`], else 0.
    pub width: u8,
    /// Encoded length in bytes.
    pub len: usize,
    /// Length before encoding in bytes.
    pub raw_len: usize,
    /// 64-bit XXH3 of the encoded bytes.
    pub checksum: u64,
    /// 64-bit XXH3 of the bytes before encoding.
    pub raw_checksum: u64,
}

/// Encodes chunks, which [`decode_chunk`] can decode. Each thread needs its own encoder.
///
/// ```
/// use ts_format::{Codec, Dtype, Encoder, Scratch, decode_chunk};
///
/// let (raw, mut stored) = ([0; 4096], Vec::new());
/// let encoded = Encoder::new(Codec::Zstd, None)?.encode(Dtype::I64, &raw, &mut stored);
/// assert!(encoded.len < 100);
///
/// let mut decoded = [1; 4096];
/// decode_chunk(encoded.codec, encoded.width, &stored, &mut decoded, &mut Scratch::default())?;
/// assert_eq!(decoded, raw);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    /// Creates an encoder. A `level` of `None` is the default level of the codec.
    ///
    /// # Errors
    /// Returns an error message if the codec does not have this level.
    pub fn new(codec: Codec, level: Option<i32>) -> Result<Self, String> {
        codec.check_level(level)?;
        let default = codec.levels().map(|(_, default)| default);
        let level = level.or(default).unwrap_or(0);
        let zstd = (codec == Codec::Zstd).then(|| {
            let mut context = CCtx::create();
            let set = context.set_parameter(CParameter::CompressionLevel(level));
            set.expect("the level is within the range of zstd levels");
            context
        });
        let split = (codec == Codec::Split).then(split::Coder::new);
        Ok(Self { codec, zstd, split, level })
    }

    /// Creates an encoder that is about twice as fast. Its chunks are slightly longer.
    ///
    /// It needs at most [`QUICK_BYTES`](Self::QUICK_BYTES) of memory, besides the chunks. For
    /// [`Dtype::F64`], it needs up to twice as much.
    pub fn quick(codec: Codec) -> Self {
        let level = codec.levels().map(|(levels, _)| 1.clamp(*levels.start(), *levels.end()));
        let quick = Self::new(codec, level).expect("the level is within the range of the codec");
        let split = quick.split.is_some().then(split::Coder::quick);
        Self { split, ..quick }
    }

    /// The maximum memory use of a [quick](Self::quick) encoder for chunks of up to
    /// [`CHUNK_LEN`](crate::CHUNK_LEN) bytes, in bytes.
    pub const QUICK_BYTES: usize = 2 << 20;

    /// Returns the current memory use in bytes.
    pub fn bytes(&self) -> usize {
        let split = self.split.as_ref().map_or(0, split::Coder::bytes);
        self.zstd.as_ref().map_or(0, CCtx::sizeof) + split
    }

    /// Encodes a chunk of a tensor of this dtype and appends it to `out`. Appends `raw` itself if
    /// its encoded form would not be smaller. `raw` must consist of whole elements.
    pub fn encode(&mut self, dtype: Dtype, raw: &[u8], out: &mut Vec<u8>) -> Encoded {
        let begin = out.len();
        let (codec, width) = self.append(dtype, raw, out);
        let len = out.len() - begin;
        let raw_checksum = XxHash3_64::oneshot(raw);
        let checksum =
            if codec == Codec::Raw { raw_checksum } else { XxHash3_64::oneshot(&out[begin..]) };
        Encoded { codec, width, len, raw_len: raw.len(), checksum, raw_checksum }
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
                    .expect("the buffer is large enough for any result");
                out.truncate(begin + len);
            }
            (Codec::Lz4, ..) => {
                out.resize(begin + lz4_flex::block::get_maximum_output_size(raw.len()), 0);
                let len = lz4_flex::block::compress_into(raw, &mut out[begin..]);
                out.truncate(begin + len.expect("the buffer is large enough for any result"));
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
            Err(error) => unreachable!("deflate accepts any input: {error}"),
        }
    }
}
