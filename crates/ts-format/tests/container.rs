// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips of `.ts` files, and detection of damage.

use proptest::prelude::*;
use ts_format::{
    ByteRange, CHUNK_LEN, Catalog, Codec, ContainerWriter, Digest, Dtype, Encoder, ErrorKind,
    Metadata, SafetensorsLayout, Scratch, TensorMeta, decode_chunk, fingerprint,
    tensor_fingerprint,
};

/// A tensor to write: name, type, phase, bytes and codec.
type Tensor = (String, TensorMeta, Option<u8>, Vec<u8>, Codec);

fn tensor(name: &str, dtype: Dtype, shape: &[u64], phase: Option<u8>, seed: u8) -> Tensor {
    let meta = TensorMeta { dtype, shape: shape.to_vec() };
    let len = meta.byte_len().expect("the size fits in 64 bits") as usize;
    let bytes = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    (name.into(), meta, phase, bytes, Codec::Raw)
}

fn with_codec(codec: Codec, tensor: Tensor) -> Tensor {
    (tensor.0, tensor.1, tensor.2, tensor.3, codec)
}

fn write(tensors: &[Tensor], metadata: &[(&str, &str)]) -> Vec<u8> {
    let metadata = metadata.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect();
    let mut writer = ContainerWriter::new(metadata);
    let mut file = vec![0; 8192];
    for (name, meta, phase, bytes, codec) in tensors {
        if *codec == Codec::Raw {
            let offset = writer.begin(name, meta.clone(), *phase).expect("the tensor is valid");
            file.resize(offset as usize, 0);
            file.extend(bytes);
            for piece in bytes.chunks(777_777) {
                writer.feed(piece).expect("the tensor is not complete yet");
            }
            continue;
        }
        writer.begin_chunked(name, meta.clone(), *phase).expect("the tensor is valid");
        let mut encoder = Encoder::new(*codec, None).expect("every codec has a default level");
        for raw in bytes.chunks(CHUNK_LEN as usize) {
            let mut stored = Vec::new();
            let encoded = encoder.encode(meta.dtype, raw, &mut stored);
            let offset = writer.push_chunk(&encoded).expect("the chunk has the right length");
            file.resize(offset as usize, 0);
            file.extend(stored);
        }
    }
    let tail = writer.finish().expect("all tensors are complete");
    file.resize(tail.index_offset as usize, 0);
    file.extend(&tail.index);
    file[..tail.superblocks.len()].copy_from_slice(&tail.superblocks);
    file
}

/// Returns the bytes of a tensor, or an error if a checksum does not match.
fn read(file: &[u8], tensor: ts_format::Tensor<'_>) -> Result<Vec<u8>, String> {
    let range = tensor.range();
    let Some(chunks) = tensor.chunks() else {
        let bytes = file[range.offset as usize..(range.offset + range.len) as usize].to_vec();
        let digest = tensor.checksums().map_or(Digest::default(), |_| Digest::of(&bytes));
        return if Some(digest.chunks()) == tensor.checksums() {
            Ok(bytes)
        } else {
            Err("checksum mismatch".into())
        };
    };
    let mut bytes = vec![0; range.len as usize];
    let mut scratch = Scratch::default();
    for (chunk, out) in chunks.iter().zip(bytes.chunks_mut(CHUNK_LEN as usize)) {
        let stored = &file[chunk.offset as usize..][..chunk.len as usize];
        if !chunk.matches(stored) {
            return Err("checksum mismatch in a chunk".into());
        }
        decode_chunk(chunk.codec, chunk.width, stored, out, &mut scratch)
            .map_err(|e| e.to_string())?;
    }
    Ok(bytes)
}

fn small() -> Vec<u8> {
    let tensors = [
        tensor("a.weight", Dtype::F32, &[3, 5], None, 1),
        tensor("empty", Dtype::BF16, &[0, 4], None, 2),
        tensor("scalar", Dtype::F64, &[], Some(8), 3),
        with_codec(Codec::Split, tensor("split", Dtype::F32, &[300], Some(20), 4)),
        with_codec(Codec::Zstd, tensor("zstd", Dtype::I64, &[99], None, 5)),
    ];
    write(&tensors, &[("format", "pt"), ("ключ", "значение")])
}

#[test]
fn a_small_file_round_trips() {
    let file = small();
    let catalog = Catalog::from_bytes("m", &file).unwrap();
    let names: Vec<_> = catalog.tensors().map(|t| t.name()).collect();
    assert_eq!(names, ["a.weight", "empty", "scalar", "split", "zstd"]);
    assert_eq!(catalog.files()[0].metadata["ключ"], "значение");
    assert_eq!(catalog.tensor("scalar").unwrap().range().offset % 64, 8, "the phase is kept");
    let weight = catalog.tensor("a.weight").unwrap();
    let bytes = read(&file, weight).unwrap();
    assert_eq!(catalog.digest(weight.range()).unwrap().mismatch(0, &bytes), None);
    assert_eq!((weight.range().offset % 64, small()), (0, file), "writing is deterministic");
}

#[test]
fn ranges_of_compressed_tensors_are_virtual_and_can_be_divided() {
    let file = small();
    let catalog = Catalog::from_bytes("m", &file).unwrap();
    let split = catalog.tensor("split").unwrap();
    let range = split.range();
    assert!(range.is_virtual() && range.offset % 64 == 20 && range.len == 1200);
    let part = |begin: u64, len: u64| ByteRange { offset: range.offset + begin, len, ..range };
    for (begin, len) in [(0, 1200), (1199, 1), (400, 800)] {
        assert_eq!(catalog.tensor_containing(part(begin, len)).unwrap().name(), "split");
    }
    assert!(catalog.tensor_containing(part(400, 801)).is_none(), "the range exceeds the tensor");
    assert_eq!(catalog.digest(range), None);
    let meta = || TensorMeta { dtype: Dtype::F32, shape: vec![2, 100] };
    let halves = || vec![part(800, 400), part(0, 400)];
    assert!(catalog.assemble("t", meta(), halves()).is_ok());
    assert!(catalog.assemble("t", meta(), vec![part(800, 800)]).is_err());
}

#[test]
fn truncation_at_any_byte_is_an_error() {
    let file = small();
    for len in 0..file.len() {
        let error =
            Catalog::from_bytes("m", &file[..len]).expect_err("a truncated file has no catalog");
        assert_eq!(error.kind(), ErrorKind::BadFile, "cut at {len}: {error}");
    }
}

#[test]
fn every_flipped_bit_is_detected_except_in_padding() {
    let file = small();
    let clean = Catalog::from_bytes("m", &file).unwrap();
    let mut undetected = Vec::new();
    for bit in 0..file.len() * 8 {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let Ok(catalog) = Catalog::from_bytes("m", &damaged) else { continue };
        let detected = catalog.tensors().any(|tensor| read(&damaged, tensor).is_err());
        if !detected {
            undetected.push(bit / 8);
        }
    }
    // All bytes are checked except the inactive superblock and the padding between tensors.
    let mut used = Vec::new();
    for tensor in clean.tensors() {
        match tensor.chunks() {
            None => used.push(tensor.range().offset..tensor.range().offset + tensor.range().len),
            Some(chunks) => {
                used.extend(chunks.iter().map(|c| c.offset..c.offset + u64::from(c.len)));
            }
        }
    }
    let padding =
        |at: usize| (4096..8192).contains(&at) || !used.iter().any(|r| r.contains(&(at as u64)));
    assert!(undetected.iter().all(|&at| padding(at)), "{undetected:?}");
    assert!(
        undetected.iter().all(|&at| at >= 4096),
        "every bit of the active superblock is checked"
    );
}

#[test]
fn a_tensor_takes_less_than_200_bytes_plus_its_name() {
    let meta = || TensorMeta { dtype: Dtype::F32, shape: vec![16, 2, 2] };
    let mut writer = ContainerWriter::new(Metadata::default());
    let count = 100_000;
    for i in 0..count {
        writer.begin(&format!("model.layers.{i}.self_attn.q_proj.weight"), meta(), None).unwrap();
        writer.feed(&[7; 256]).unwrap();
    }
    let tail = writer.finish().unwrap();
    let mut file = tail.superblocks;
    file.resize(tail.index_offset as usize, 0);
    file.extend(&tail.index);
    let catalog = Catalog::from_bytes("m", &file).unwrap();
    let range = catalog.tensor("model.layers.5.self_attn.q_proj.weight").unwrap().range();
    assert!(catalog.tensor_containing(range).is_some());
    let each = catalog.heap_bytes() / count;
    assert!((64..200).contains(&each), "{each} bytes");
}

#[test]
fn a_later_major_version_is_refused() {
    let mut file = small();
    file[8] = 2;
    let sum = Digest::of(&file[..56]).chunks()[0];
    file[56..64].copy_from_slice(&sum.to_le_bytes());
    assert!(Catalog::from_bytes("m", &file).unwrap_err().to_string().contains("version 2"));
    let mut minor = small();
    minor[10] = 9;
    let sum = Digest::of(&minor[..56]).chunks()[0];
    minor[56..64].copy_from_slice(&sum.to_le_bytes());
    assert!(Catalog::from_bytes("m", &minor).is_ok(), "a later minor version is readable");
}

#[test]
fn invalid_writes_are_errors_with_a_reason() {
    let meta = || TensorMeta { dtype: Dtype::U8, shape: vec![2] };
    let mut writer = ContainerWriter::new(Metadata::default());
    for name in ["", "a\0b"] {
        assert!(
            writer
                .begin(name, meta(), None)
                .unwrap_err()
                .to_string()
                .contains("invalid tensor name")
        );
    }
    assert!(writer.feed(b"x").is_err(), "no tensor is pending");
    let deep = TensorMeta { dtype: Dtype::U8, shape: vec![1; 65] };
    assert!(writer.begin("deep", deep, None).unwrap_err().to_string().contains("rank 65"));
    let huge = TensorMeta { dtype: Dtype::F64, shape: vec![1 << 60, 2] };
    assert!(
        writer.begin("huge", huge, None).unwrap_err().to_string().contains("whole number of bytes")
    );
    writer.begin("a", meta(), None).unwrap();
    assert!(writer.feed(b"xyz").unwrap_err().to_string().contains("more than its 2 bytes"));
    assert!(writer.begin("b", meta(), None).unwrap_err().to_string().contains("got 0"));
    let mut writer = ContainerWriter::new(Metadata::default());
    writer.begin("a", meta(), None).unwrap();
    writer.feed(b"xy").unwrap();
    assert!(
        writer.begin("a", meta(), None).unwrap_err().to_string().contains("duplicate tensor name")
    );
}

#[test]
fn fingerprints_depend_only_on_content() {
    let of = |tensors: &[Tensor]| {
        let file = write(tensors, &[]);
        let catalog = Catalog::from_bytes("m", &file).unwrap();
        fingerprint(
            catalog
                .tensors()
                .map(|t| (t.name(), t.fingerprint().expect(".ts files have fingerprints"))),
        )
    };
    let (a, b) = (tensor("a", Dtype::F32, &[9], None, 1), tensor("b", Dtype::F32, &[9], None, 2));
    let moved = tensor("a", Dtype::F32, &[9], Some(24), 1);
    assert_eq!(of(&[a.clone(), b.clone()]), of(&[b.clone(), moved]));
    for &codec in Codec::ALL {
        assert_eq!(
            of(&[a.clone(), b.clone()]),
            of(&[with_codec(codec, b.clone()), a.clone()]),
            "the codec does not matter"
        );
    }
    assert_ne!(
        of(&[a.clone(), b.clone()]),
        of(&[tensor("a", Dtype::F32, &[9], None, 3), b.clone()])
    );
    assert_ne!(of(std::slice::from_ref(&a)), of(&[tensor("a", Dtype::I32, &[9], None, 1)]));
    assert_ne!(of(&[a]), of(&[tensor("a", Dtype::F32, &[3, 3], None, 1)]));
}

#[test]
fn a_quick_encoder_has_bounded_memory_and_nearly_the_same_ratio() {
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Weights of a layer have few exponents.
        let (random, exponent) = (state >> 16, 118 + (state >> 9 & 3));
        ((random & 0x807f) as u16 | (exponent << 7) as u16).to_le_bytes()
    };
    let raw: Vec<u8> = (0..CHUNK_LEN / 2).flat_map(|_| value()).collect();
    let split = [Dtype::BF16, Dtype::F32].map(|dtype| (Codec::Split, dtype));
    for (codec, dtype) in split.into_iter().chain([(Codec::Zstd, Dtype::I64)]) {
        let (mut full, mut quick) = (Vec::new(), Vec::new());
        Encoder::new(codec, None).unwrap().encode(dtype, &raw, &mut full);
        let mut encoder = Encoder::quick(codec);
        let encoded = encoder.encode(dtype, &raw, &mut quick);
        assert!(encoder.bytes() > 1 << 16 && encoder.bytes() <= Encoder::QUICK_BYTES);
        assert!(quick.len() as f64 <= 1.02 * full.len() as f64, "{} {}", quick.len(), full.len());
        let mut decoded = vec![0; raw.len()];
        let mut scratch = Scratch::default();
        decode_chunk(encoded.codec, encoded.width, &quick, &mut decoded, &mut scratch).unwrap();
        assert!(decoded == raw);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn files_round_trip(
        specs in prop::collection::vec(
            (
                prop::sample::select(Dtype::ALL),
                prop::sample::select(Codec::ALL),
                prop::collection::vec(0u64..9, 0..4),
                prop::option::of(0u8..64),
            ),
            0..8,
        ),
        long in 0u64..2_500_000,
        long_as in (
            prop::sample::select(Codec::ALL),
            prop::sample::select(&[Dtype::U8, Dtype::BF16, Dtype::F64][..]),
        ),
    ) {
        let mut tensors: Vec<Tensor> = Vec::new();
        for (i, (dtype, codec, mut shape, phase)) in specs.into_iter().enumerate() {
            if dtype.bits() < 8 {
                shape.push(4); // makes a whole number of bytes
            }
            let name = format!("t{i}");
            tensors.push(with_codec(codec, tensor(&name, dtype, &shape, phase, i as u8)));
        }
        let (codec, dtype) = long_as;
        tensors.push(with_codec(
            codec,
            tensor("long", dtype, &[long * 8 / u64::from(dtype.bits())], None, 77),
        ));
        let file = write(&tensors, &[]);
        let catalog = Catalog::from_bytes("m", &file).unwrap();
        prop_assert_eq!(catalog.tensors().len(), tensors.len());
        for (name, meta, phase, bytes, codec) in &tensors {
            let read_back = catalog.tensor(name).unwrap();
            prop_assert_eq!(&read_back.meta(), meta);
            prop_assert_eq!(read_back.range().offset % 64, u64::from(phase.unwrap_or(0)));
            prop_assert!(&read(&file, read_back).unwrap() == bytes);
            prop_assert_eq!(read_back.chunks().is_none(), *codec == Codec::Raw);
            prop_assert_eq!(
                read_back.fingerprint(),
                Some(tensor_fingerprint(meta, &Digest::of(bytes)))
            );
        }
    }

    /// Reading an index with random changes, but valid checksums, returns a catalog or an error.
    #[test]
    fn no_index_causes_a_panic_or_an_out_of_bounds_range(
        edits in prop::collection::vec((0usize..600, any::<u8>()), 1..8),
    ) {
        let mut file = small();
        let word =
            |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
        let (begin, len) = (word(&file, 24) as usize, word(&file, 32) as usize);
        for (at, value) in edits {
            file[begin + at % len] = value;
        }
        // The checksum of a single chunk is plain XXH3, as in the index and the superblock.
        let sum = Digest::of(&file[begin..begin + len]).chunks()[0];
        file[40..48].copy_from_slice(&sum.to_le_bytes());
        let sum = Digest::of(&file[..56]).chunks()[0];
        file[56..64].copy_from_slice(&sum.to_le_bytes());
        if let Ok(catalog) = Catalog::from_bytes("m", &file) {
            for tensor in catalog.tensors() {
                match tensor.chunks() {
                    None => {
                        prop_assert!(tensor.range().offset + tensor.range().len <= begin as u64);
                    }
                    Some(chunks) => {
                        prop_assert!(
                            chunks.iter().all(|c| c.offset + u64::from(c.len) <= begin as u64)
                        );
                    }
                }
                let _ = read(&file, tensor);
            }
        }
    }
}

/// Returns a file with every dtype in every codec, a scalar and an empty tensor.
fn golden() -> Vec<u8> {
    let mut tensors = vec![
        tensor("scalar", Dtype::F64, &[], Some(8), 3),
        tensor("empty", Dtype::BF16, &[0, 4], None, 2),
    ];
    for (i, &dtype) in first_dtypes().enumerate() {
        for (j, &codec) in Codec::ALL.iter().enumerate() {
            let (name, phase) =
                (format!("{dtype}.{codec}"), (j == 1).then_some((i as u8 * 8) % 64));
            let mut tensor = tensor(&name, dtype, &[3, 52], phase, i as u8);
            // Makes the bytes compressible by every codec.
            tensor.3.iter_mut().for_each(|byte| *byte &= 0x30);
            tensors.push(with_codec(codec, tensor));
        }
    }
    write(&tensors, &[("format", "pt"), ("written by", "version 1.0")])
}

/// The dtypes that the first files could have.
fn first_dtypes() -> impl Iterator<Item = &'static Dtype> {
    Dtype::ALL.iter().filter(|dtype| dtype.is_in_safetensors())
}

/// Later versions must read this file. It was written once, with `TS_WRITE_GOLDEN=1`.
#[test]
fn a_file_of_version_1_0_is_readable() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/version-1.0.ts");
    if std::env::var_os("TS_WRITE_GOLDEN").is_some() {
        std::fs::write(path, golden()).unwrap();
    }
    let file = std::fs::read(path).unwrap();
    let (catalog, expected) = (Catalog::from_bytes("m", &file).unwrap(), golden());
    let expected_catalog = Catalog::from_bytes("m", &expected).unwrap();
    assert_eq!(catalog.files()[0].metadata, expected_catalog.files()[0].metadata);
    assert_eq!(catalog.tensors().len(), 2 + first_dtypes().count() * Codec::ALL.len());
    for (old, new) in catalog.tensors().zip(expected_catalog.tensors()) {
        assert_eq!(
            (old.name(), old.meta(), old.fingerprint()),
            (new.name(), new.meta(), new.fingerprint())
        );
        assert_eq!(read(&file, old).unwrap(), read(&expected, new).unwrap(), "{}", old.name());
    }
}

#[test]
fn metadata_keeps_its_order_and_whether_it_is_stated() {
    let orders: [&[(&str, &str)]; 4] =
        [&[], &[("b", "1"), ("a", "2"), ("c", "")], &[("", "x")], &[("z", ""), ("y", "z")]];
    for entries in orders {
        let file = write(&[tensor("t", Dtype::U8, &[3], None, 1)], entries);
        let catalog = Catalog::from_bytes("m", &file).unwrap();
        let metadata = &catalog.files()[0].metadata;
        let found: Vec<_> = metadata.iter().map(|(key, value)| (&**key, &**value)).collect();
        assert_eq!(found, entries);
        assert_eq!(metadata.is_stated(), !entries.is_empty());
    }
    let mut writer = ContainerWriter::new(Metadata::stated());
    let meta = TensorMeta { dtype: Dtype::C128, shape: vec![0] };
    writer.begin("t", meta.clone(), None).unwrap();
    let tail = writer.finish().unwrap();
    let catalog = Catalog::from_bytes("m", &[tail.superblocks, tail.index].concat()).unwrap();
    let metadata = &catalog.files()[0].metadata;
    assert!(metadata.is_empty() && metadata.is_stated());
    let layout = SafetensorsLayout::new(&[], metadata).unwrap();
    assert!(layout.header[8..].starts_with(br#"{"__metadata__":{}}"#));
    // Only `.ts` files have the other complex numbers.
    assert!(SafetensorsLayout::new(&[("t", &meta)], metadata).is_err());
    let header = br#"{"t":{"dtype":"C128","shape":[0],"data_offsets":[0,0]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    assert!(Catalog::from_bytes("m", &file).is_err());
    assert!(Catalog::from_bytes_lenient("m", &file).is_err());
}
