// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream bench codec`: measures compression ratio and speed in memory.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use ts_format::{CHUNK_LEN, Codec, Compression, Encoded, Encoder, Scratch, Tensor, decode_chunk};
use ts_pool::{BLOCK_ALIGN, Budget, HostPool};

use super::arguments::{CheckpointPath, at_least_one, budget};
use super::console::{Console, MIB, say};
use crate::{Checkpoint, Error};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    checkpoint: CheckpointPath,
    /// The codec to measure: auto, split, zstd, lz4 or zlib.
    #[arg(long, default_value = "auto")]
    codec: String,
    /// Number of tensor bytes to use, such as 64MiB. Tensors are used whole, in the order of their
    /// names, until this number is reached.
    #[arg(long, value_parser = budget, default_value = "64MiB")]
    bytes: usize,
    /// Number of measurements. The median is reported.
    #[arg(long, default_value_t = 9, value_parser = at_least_one)]
    rounds: usize,
}

/// An encoded chunk and its bytes.
struct EncodedChunk {
    encoded: Encoded,
    stored: Vec<u8>,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let path = &arguments.checkpoint.path;
    let failed = |reason| Error::Compression { path: path.clone(), reason };
    let compression = Compression::parse(&arguments.codec, None).map_err(failed)?;
    let checkpoint = Checkpoint::open(path)?;
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
        return Err(failed(format!(
            "codec {} compresses no tensor of this checkpoint; choose another codec",
            arguments.codec
        )));
    }
    let mut raw = vec![0; total];
    let mut rest = &mut raw[..];
    for tensor in &tensors {
        let (now, later) = rest.split_at_mut(tensor.range().len as usize);
        checkpoint.read(&[tensor.range()], now)?;
        rest = later;
    }
    // The memory is touched before the measurement, so that page faults do not count.
    let pool = HostPool::new(&Budget::new(usize::MAX), total.next_multiple_of(BLOCK_ALIGN))
        .map_err(ts_io::Error::from)?;
    let mut target = pool.allocate(total).map_err(ts_io::Error::from)?;
    target.fill(1);

    let (mut chunks, mut rates): (Vec<EncodedChunk>, [Vec<f64>; 4]) =
        (Vec::new(), Default::default());
    for _ in 0..arguments.rounds {
        let [encode, decode, two, copy] = &mut rates;
        let began = Instant::now();
        chunks = encode_all(&tensors, &raw, compression, path)?;
        encode.push(rate(total, began));
        let began = Instant::now();
        decode_all(&chunks, &mut target);
        decode.push(rate(total, began));
        assert!(target[..] == raw, "decoded bytes equal the original");
        let (half, bytes) = halves(&chunks);
        let began = Instant::now();
        let (first, second) = target.split_at_mut(bytes);
        std::thread::scope(|scope| {
            scope.spawn(|| decode_all(&chunks[half..], second));
            decode_all(&chunks[..half], first);
        });
        two.push(rate(total, began));
        let began = Instant::now();
        target.copy_from_slice(&raw);
        copy.push(rate(total, began));
        if interrupt() {
            return Err(Error::Interrupted);
        }
    }
    let stored: usize = chunks.iter().map(|chunk| chunk.stored.len()).sum();
    let ratio = total as f64 / stored as f64;
    let [encode, decode, two, copy] = rates.map(median);
    if console.json {
        say(json!({
            "path": path,
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
            "{:.1} MiB, encoded {:.1} MiB, ratio {ratio:.4}",
            total as f64 / MIB,
            stored as f64 / MIB
        ));
        say(format_args!("encode {encode:.2} GB/s, decode {decode:.2} GB/s"));
        say(format_args!("decode on two threads {two:.2} GB/s"));
        say(format_args!("memcpy to the same memory {copy:.2} GB/s"));
    }
    Ok(0)
}

fn encode_all(
    tensors: &[Tensor<'_>],
    raw: &[u8],
    compression: Compression,
    path: &Path,
) -> Result<Vec<EncodedChunk>, Error> {
    let mut encoders: Vec<(Codec, Encoder)> = Vec::new();
    let (mut chunks, mut rest) = (Vec::new(), raw);
    for tensor in tensors {
        let (now, later) = rest.split_at(tensor.range().len as usize);
        rest = later;
        let codec =
            compression.codec(tensor.dtype()).expect("tensors without a codec were filtered out");
        let at = match encoders.iter().position(|(known, _)| *known == codec) {
            Some(at) => at,
            None => {
                let encoder = Encoder::new(codec, compression.level(codec));
                let encoder =
                    encoder.map_err(|reason| Error::Compression { path: path.into(), reason })?;
                encoders.push((codec, encoder));
                encoders.len() - 1
            }
        };
        for chunk in now.chunks(CHUNK_LEN as usize) {
            let mut stored = Vec::new();
            let encoded = encoders[at].1.encode(tensor.dtype(), chunk, &mut stored);
            chunks.push(EncodedChunk { encoded, stored });
        }
    }
    Ok(chunks)
}

fn decode_all(chunks: &[EncodedChunk], mut target: &mut [u8]) {
    let mut scratch = Scratch::default();
    for EncodedChunk { encoded, stored } in chunks {
        let (now, later) = target.split_at_mut(encoded.raw_len);
        decode_chunk(encoded.codec, encoded.width, stored, now, &mut scratch)
            .expect("the chunk is valid because `encode` returned it");
        target = later;
    }
}

/// Returns the number of chunks in the first half of all bytes, and their decoded length in bytes.
fn halves(chunks: &[EncodedChunk]) -> (usize, usize) {
    let total: usize = chunks.iter().map(|chunk| chunk.encoded.raw_len).sum();
    let mut bytes = 0;
    let count = chunks.iter().take_while(|chunk| {
        bytes += chunk.encoded.raw_len;
        bytes <= total / 2
    });
    let count = count.count();
    (count, chunks[..count].iter().map(|chunk| chunk.encoded.raw_len).sum())
}

fn rate(bytes: usize, began: Instant) -> f64 {
    bytes as f64 / began.elapsed().as_secs_f64() / 1e9
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
