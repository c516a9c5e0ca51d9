// SPDX-License-Identifier: MIT OR Apache-2.0
//! `.ts` files: what is written is read, and what is damaged is refused.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ts_format::{Catalog, ContainerWriter, Digest, Dtype, ErrorKind, TensorMeta, fingerprint};

type Tensor = (String, TensorMeta, Option<u8>, Vec<u8>);

fn tensor(name: &str, dtype: Dtype, shape: &[u64], phase: Option<u8>, seed: u8) -> Tensor {
    let meta = TensorMeta { dtype, shape: shape.to_vec() };
    let len = meta.byte_len().expect("a size") as usize;
    let bytes = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    (name.into(), meta, phase, bytes)
}

fn write(tensors: &[Tensor], metadata: &[(&str, &str)]) -> Vec<u8> {
    let metadata = metadata.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect();
    let mut writer = ContainerWriter::new(metadata);
    let mut file = vec![0; 8192];
    for (name, meta, phase, bytes) in tensors {
        let offset = writer.begin(name, meta.clone(), *phase).expect("begins");
        file.resize(offset as usize, 0);
        file.extend(bytes);
        for piece in bytes.chunks(777_777) {
            writer.feed(piece).expect("fits");
        }
    }
    let ends = writer.finish().expect("complete");
    assert_eq!(ends.index_offset, file.len() as u64);
    file.extend(&ends.index);
    file[..ends.superblocks.len()].copy_from_slice(&ends.superblocks);
    file
}

fn small() -> Vec<u8> {
    let tensors = [
        tensor("a.weight", Dtype::F32, &[3, 5], None, 1),
        tensor("empty", Dtype::BF16, &[0, 4], None, 2),
        tensor("scalar", Dtype::F64, &[], Some(8), 3),
    ];
    write(&tensors, &[("format", "pt"), ("ключ", "значение")])
}

#[test]
fn a_small_file_reads_as_it_was_written() {
    let file = small();
    let catalog = Catalog::from_bytes("m", &file).unwrap();
    assert_eq!(catalog.tensors().map(|(n, _)| n).collect::<Vec<_>>(), ["a.weight", "empty", "scalar"]);
    assert_eq!(catalog.files()[0].metadata["ключ"], "значение");
    let scalar = catalog.tensor("scalar").unwrap();
    assert_eq!(scalar.parts[0].offset % 64, 8, "it has its phase");
    let weight = catalog.tensor("a.weight").unwrap().parts[0];
    let bytes = &file[weight.offset as usize..(weight.offset + weight.len) as usize];
    assert_eq!(catalog.digest(weight).unwrap().mismatch(0, bytes), None);
    assert_eq!((weight.offset % 64, small()), (0, file), "the same input gives the same bytes");
}

#[test]
fn a_file_cut_anywhere_is_a_typed_error() {
    let file = small();
    for len in 0..file.len() {
        let error = Catalog::from_bytes("m", &file[..len]).expect_err("a cut file has no catalog");
        assert_eq!(error.kind(), ErrorKind::BadFile, "cut at {len}: {error}");
    }
}

#[test]
fn every_flipped_bit_of_superblocks_index_and_data_is_found() {
    let file = small();
    let clean = Catalog::from_bytes("m", &file).unwrap();
    let mut unseen = Vec::new();
    for bit in 0..file.len() * 8 {
        let mut harmed = file.clone();
        harmed[bit / 8] ^= 1 << (bit % 8);
        let Ok(catalog) = Catalog::from_bytes("m", &harmed) else { continue };
        let found = catalog.tensors().any(|(_, entry)| {
            let part = entry.parts[0];
            let bytes = &harmed[part.offset as usize..(part.offset + part.len) as usize];
            catalog.digest(part).is_some_and(|digest| digest.mismatch(0, bytes).is_some())
        });
        if !found {
            unseen.push(bit / 8);
        }
    }
    // What is left is padding between tensors and the superblock that is not in use.
    let padding = |at: usize| {
        (4096..8192).contains(&at)
            || clean.tensors().all(|(_, e)| {
                let (begin, len) = (e.parts[0].offset as usize, e.parts[0].len as usize);
                !(begin..begin + len).contains(&at)
            })
    };
    assert!(unseen.iter().all(|&at| padding(at)), "{unseen:?}");
    assert!(unseen.iter().all(|&at| at >= 4096), "the superblock in use is checked to its last bit");
}

#[test]
fn a_later_version_is_refused_by_its_number() {
    let mut file = small();
    file[8] = 2;
    let sum = Digest::of(&file[..56]).chunks()[0];
    file[56..64].copy_from_slice(&sum.to_le_bytes());
    assert!(Catalog::from_bytes("m", &file).unwrap_err().to_string().contains("version 2"));
    let mut minor = small();
    minor[10] = 9;
    let sum = Digest::of(&minor[..56]).chunks()[0];
    minor[56..64].copy_from_slice(&sum.to_le_bytes());
    assert!(Catalog::from_bytes("m", &minor).is_ok(), "a newer minor version is readable");
}

#[test]
fn what_cannot_be_written_says_why() {
    let meta = || TensorMeta { dtype: Dtype::U8, shape: vec![2] };
    let mut writer = ContainerWriter::new(BTreeMap::new());
    for name in ["", "a\0b"] {
        assert!(writer.begin(name, meta(), None).unwrap_err().to_string().contains("no tensor name"));
    }
    assert!(writer.feed(b"x").is_err(), "nothing was begun");
    let deep = TensorMeta { dtype: Dtype::U8, shape: vec![1; 65] };
    assert!(writer.begin("deep", deep, None).unwrap_err().to_string().contains("rank 65"));
    let huge = TensorMeta { dtype: Dtype::F64, shape: vec![1 << 60, 2] };
    assert!(writer.begin("huge", huge, None).unwrap_err().to_string().contains("no size"));
    writer.begin("a", meta(), None).unwrap();
    assert!(writer.feed(b"xyz").unwrap_err().to_string().contains("gets more"));
    assert!(writer.begin("b", meta(), None).unwrap_err().to_string().contains("got 0"));
    let mut writer = ContainerWriter::new(BTreeMap::new());
    writer.begin("a", meta(), None).unwrap();
    writer.feed(b"xy").unwrap();
    assert!(writer.begin("a", meta(), None).unwrap_err().to_string().contains("before"));
}

#[test]
fn a_fingerprint_names_the_content_and_not_the_place() {
    let of = |tensors: &[Tensor]| {
        let file = write(tensors, &[]);
        let catalog = Catalog::from_bytes("m", &file).unwrap();
        let empty = Digest::default();
        let all: Vec<_> = catalog
            .tensors()
            .map(|(n, e)| (n, &e.meta, catalog.digest(e.parts[0]).map_or(&empty, |d| &**d)))
            .collect();
        fingerprint(all)
    };
    let (a, b) = (tensor("a", Dtype::F32, &[9], None, 1), tensor("b", Dtype::F32, &[9], None, 2));
    let moved = tensor("a", Dtype::F32, &[9], Some(24), 1);
    assert_eq!(of(&[a.clone(), b.clone()]), of(&[b.clone(), moved]));
    assert_ne!(of(&[a.clone(), b.clone()]), of(&[tensor("a", Dtype::F32, &[9], None, 3), b.clone()]));
    assert_ne!(of(std::slice::from_ref(&a)), of(&[tensor("a", Dtype::I32, &[9], None, 1)]));
    assert_ne!(of(&[a]), of(&[tensor("a", Dtype::F32, &[3, 3], None, 1)]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_what_is_read(
        specs in prop::collection::vec(
            (prop::sample::select(Dtype::ALL), prop::collection::vec(0u64..9, 0..4), prop::option::of(0u8..64)), 0..8),
        long in 0u64..2_500_000,
    ) {
        let mut tensors: Vec<Tensor> = Vec::new();
        for (i, (dtype, mut shape, phase)) in specs.into_iter().enumerate() {
            if dtype.bits() < 8 {
                shape.push(4); // whole bytes
            }
            tensors.push(tensor(&format!("t{i}"), dtype, &shape, phase, i as u8));
        }
        tensors.push(tensor("long", Dtype::U8, &[long], None, 77));
        let file = write(&tensors, &[]);
        let catalog = Catalog::from_bytes("m", &file).unwrap();
        prop_assert_eq!(catalog.tensors().len(), tensors.len());
        for (name, meta, phase, bytes) in &tensors {
            let entry = catalog.tensor(name).unwrap();
            let part = entry.parts[0];
            prop_assert_eq!(&entry.meta, meta);
            prop_assert_eq!(part.offset % 64, u64::from(phase.unwrap_or(0)));
            let there = &file[part.offset as usize..(part.offset + part.len) as usize];
            prop_assert_eq!(there, &bytes[..]);
            if part.len > 0 {
                prop_assert_eq!(&**catalog.digest(part).unwrap(), &Digest::of(bytes));
            }
        }
    }

    /// An index that is rewritten at random, with its checksums made right again, ends in a catalog or an error.
    #[test]
    fn no_index_panics_or_points_outside(edits in prop::collection::vec((0usize..400, any::<u8>()), 1..8)) {
        let mut file = small();
        let word = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
        let (begin, len) = (word(&file, 24) as usize, word(&file, 32) as usize);
        for (at, value) in edits {
            file[begin + at % len] = value;
        }
        // A chunk's checksum is plain XXH3, which the index and the superblock use too.
        let sum = Digest::of(&file[begin..begin + len]).chunks()[0];
        file[40..48].copy_from_slice(&sum.to_le_bytes());
        let sum = Digest::of(&file[..56]).chunks()[0];
        file[56..64].copy_from_slice(&sum.to_le_bytes());
        if let Ok(catalog) = Catalog::from_bytes("m", &file) {
            for (_, t) in catalog.tensors() {
                prop_assert!(t.parts.iter().all(|p| p.offset + p.len <= begin as u64));
            }
        }
    }
}
