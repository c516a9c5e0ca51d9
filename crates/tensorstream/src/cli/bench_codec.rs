// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream bench codec`: how small a checkpoint's tensors become, and how fast they are taken
//! apart and put together, in memory.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;
use ts_format::{CHUNK_LEN, Codec, Compression, Encoded, Encoder, Scratch, Tensor, decode_chunk};
use ts_pool::{BLOCK_ALIGN, Budget, HostPool};

use super::console::{Console, say};
use crate::{Checkpoint, Error};

/// What to measure.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// A .safetensors or .ts file, a shard index, or a directory with one of them.
    path: PathBuf,
    /// The codec: auto, split, zstd, lz4 or zlib.
    #[arg(long, default_value = "auto")]
    codec: String,
    /// How much of the checkpoint to use, in the order of names, such as 64MiB.
    #[arg(long, value_parser = super::budget, default_value = "64MiB")]
    bytes: usize,
    /// Measurements. The median is reported.
    #[arg(long, default_value_t = 9, value_parser = super::at_least_one)]
    rounds: usize,
}

/// A chunk, and where its bytes go.
struct Piece {
    encoded: Encoded,
    stored: Vec<u8>,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let refuse = |reason| Error::Compression { path: arguments.path.clone(), reason };
    let compression = Compression::named(&arguments.codec, None).map_err(refuse)?;
    let checkpoint = Checkpoint::open(&arguments.path)?;
    let mut taken = 0;
    let tensors: Vec<Tensor<'_>> = checkpoint
        .catalog()
        .tensors()
        .filter(|tensor| compression.codec(tensor.dtype()).is_some())
        .take_while(|tensor| {
            taken += tensor.range().len;
            taken - tensor.range().len < arguments.bytes as u64
        })
        .collect();
    let total = tensors.iter().map(|tensor| tensor.range().len as usize).sum::<usize>();
    if total == 0 {
        return Err(refuse(format!("{} compresses none of its tensors", arguments.codec)));
    }
    let mut raw = vec![0; total];
    let mut rest = &mut raw[..];
    for tensor in &tensors {
        let (now, later) = rest.split_at_mut(tensor.range().len as usize);
        checkpoint.read(&[tensor.range()], now)?;
        rest = later;
    }
    // On huge pages, touched before: what is measured is the codec and not the system's zeroing.
    let pool = HostPool::new(&Budget::new(usize::MAX), total.next_multiple_of(BLOCK_ALIGN))
        .map_err(ts_io::Error::from)?;
    let mut target = pool.allocate(total).map_err(ts_io::Error::from)?;
    target.fill(1);

    let (mut pieces, mut rates): (Vec<Piece>, [Vec<f64>; 4]) = (Vec::new(), Default::default());
    for _ in 0..arguments.rounds {
        let [encode, decode, two, copy] = &mut rates;
        let began = Instant::now();
        pieces = encode_all(&tensors, &raw, compression, &arguments.path)?;
        encode.push(rate(total, began));
        let began = Instant::now();
        decode_all(&pieces, &mut target);
        decode.push(rate(total, began));
        assert!(target[..] == raw, "what was encoded decodes to itself");
        let (half, bytes) = halves(&pieces);
        let began = Instant::now();
        let (first, second) = target.split_at_mut(bytes);
        std::thread::scope(|scope| {
            scope.spawn(|| decode_all(&pieces[half..], second));
            decode_all(&pieces[..half], first);
        });
        two.push(rate(total, began));
        let began = Instant::now();
        target.copy_from_slice(&raw);
        copy.push(rate(total, began));
        if interrupt() {
            return Err(Error::Interrupted);
        }
    }
    let stored: usize = pieces.iter().map(|piece| piece.stored.len()).sum();
    let ratio = total as f64 / stored as f64;
    let [encode, decode, two, copy] = rates.map(median);
    if console.json {
        say(json!({
            "path": arguments.path,
            "codec": arguments.codec,
            "bytes": total,
            "stored_bytes": stored,
            "ratio": ratio,
            "encode_gb_per_s": encode,
            "decode_gb_per_s": decode,
            "decode_two_threads_gb_per_s": two,
            "memcpy_gb_per_s": copy,
        }));
    } else {
        say(format_args!(
            "{:.1} MiB in {:.1}: {ratio:.4}",
            total as f64 / super::MIB,
            stored as f64 / super::MIB
        ));
        say(format_args!("encode {encode:.2}, decode {decode:.2}, on two threads {two:.2} GB/s"));
        say(format_args!("memcpy to the same memory {copy:.2} GB/s"));
    }
    Ok(0)
}

fn encode_all(
    tensors: &[Tensor<'_>],
    raw: &[u8],
    compression: Compression,
    path: &std::path::Path,
) -> Result<Vec<Piece>, Error> {
    let mut encoders: Vec<(Codec, Encoder)> = Vec::new();
    let (mut pieces, mut rest) = (Vec::new(), raw);
    for tensor in tensors {
        let (now, later) = rest.split_at(tensor.range().len as usize);
        rest = later;
        let codec = compression.codec(tensor.dtype()).expect("those without were left out");
        let at = match encoders.iter().position(|(known, _)| *known == codec) {
            Some(at) => at,
            None => {
                let encoder = Encoder::new(codec, compression.level());
                let encoder =
                    encoder.map_err(|reason| Error::Compression { path: path.into(), reason })?;
                encoders.push((codec, encoder));
                encoders.len() - 1
            }
        };
        for chunk in now.chunks(CHUNK_LEN as usize) {
            let mut stored = Vec::new();
            let encoded = encoders[at].1.encode(tensor.dtype(), chunk, &mut stored);
            pieces.push(Piece { encoded, stored });
        }
    }
    Ok(pieces)
}

fn decode_all(pieces: &[Piece], mut target: &mut [u8]) {
    let mut scratch = Scratch::default();
    for Piece { encoded, stored } in pieces {
        let (now, later) = target.split_at_mut(encoded.raw_len);
        decode_chunk(encoded.codec, encoded.width, stored, now, &mut scratch)
            .expect("it was just encoded");
        target = later;
    }
}

/// How many pieces make half of the bytes, and how many bytes these are.
fn halves(pieces: &[Piece]) -> (usize, usize) {
    let total: usize = pieces.iter().map(|piece| piece.encoded.raw_len).sum();
    let mut bytes = 0;
    let count = pieces.iter().take_while(|piece| {
        bytes += piece.encoded.raw_len;
        bytes <= total / 2
    });
    let count = count.count();
    (count, pieces[..count].iter().map(|piece| piece.encoded.raw_len).sum())
}

fn rate(bytes: usize, began: Instant) -> f64 {
    bytes as f64 / began.elapsed().as_secs_f64() / 1e9
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
