// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes arbitrary bytes with a codec that the input selects: the decoder must not panic or use
//! too much scratch memory. Also encodes arbitrary bytes, which must round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_format::{Codec, Dtype, Encoder, Scratch, decode_chunk};

const DTYPES: [Dtype; 5] = [Dtype::F8_E4M3, Dtype::BF16, Dtype::F32, Dtype::F64, Dtype::I64];

fuzz_target!(|input: (u8, u8, u32, &[u8])| {
    let (codec, width, len, bytes) = input;
    let codec = Codec::ALL[usize::from(codec) % Codec::ALL.len()];
    let mut scratch = Scratch::default();
    // A chunk has at most 1 MiB.
    let mut out = vec![0xA5; len as usize % ((1 << 20) + 1)];
    let _ = decode_chunk(codec, width, bytes, &mut out, &mut scratch);
    assert!(
        scratch.bytes() <= Scratch::BYTES,
        "scratch memory is too large: {} bytes",
        scratch.bytes()
    );

    let dtype = DTYPES[usize::from(width) % DTYPES.len()];
    let raw = &bytes[..bytes.len() / 8 * 8];
    let mut stored = Vec::new();
    let mut encoder = Encoder::new(codec, None).expect("every codec has a default level");
    let encoded = encoder.encode(dtype, raw, &mut stored);
    assert!(stored.len() == encoded.len && encoded.len <= raw.len());
    let mut decoded = vec![0x5A; raw.len()];
    decode_chunk(encoded.codec, encoded.width, &stored, &mut decoded, &mut scratch)
        .expect("an encoded chunk is valid");
    assert!(decoded == raw);
});
