// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading safetensors files and shard indexes, and the errors for malformed files.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ts_format::{ByteRange, Catalog, CatalogReader, Dtype, Error, ErrorKind, FileId, TensorMeta};

fn safetensors(header: &str, data_len: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data_len, 0x5a);
    file
}

fn read(mut reader: CatalogReader, files: &BTreeMap<String, Vec<u8>>) -> Result<Catalog, Error> {
    while let Some(need) = reader.need() {
        let file = &files[&need.file];
        let end = (need.offset + need.len).min(file.len() as u64) as usize;
        let begin = (need.offset as usize).min(end);
        reader.feed(&file[begin..end], file.len() as u64)?;
    }
    reader.finish()
}

fn read_one(bytes: &[u8]) -> Result<Catalog, Error> {
    Catalog::from_bytes("m", bytes)
}

const TWO: &str = concat!(
    r#"{"__metadata__":{"format":"pt"},"#,
    r#""b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"#,
    r#""a":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}"#,
);
/// Regular expression for random headers, which consist of the tokens of real headers.
const HEADER: &str = "(\\{|\\}|\\[|\\]|\"|:|,|a|dtype|shape|data_offsets|F32|[0-9]|-|e|\\\\){0,60}";

#[test]
fn tensors_of_a_file_have_their_ranges() {
    let catalog = read_one(&safetensors(TWO, 16)).unwrap();
    let start = 8 + TWO.len() as u64;
    let b = catalog.tensor("b").unwrap();
    assert_eq!(b.meta(), TensorMeta { dtype: Dtype::BF16, shape: vec![2, 3] });
    assert_eq!(b.range(), ByteRange { file: FileId(0), offset: start, len: 12 });
    assert_eq!(catalog.tensor("a").unwrap().range().offset, start + 12);
    assert_eq!(catalog.files()[0].metadata["format"], "pt");
    assert_eq!(catalog.require("c").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn truncation_at_any_byte_is_an_error() {
    let whole = safetensors(TWO, 16);
    for len in 0..whole.len() {
        let error = read_one(&whole[..len]).expect_err("a truncated file has no catalog");
        assert!(matches!(error, Error::Truncated { .. }), "cut at {len}: {error}");
    }
}

#[test]
fn malformed_headers_are_refused_with_a_reason() {
    let cases = [
        (r#"[]"#, 0, "begin with"),
        (r#" {}"#, 0, "begin with"),
        (
            concat!(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"#,
                r#""a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            ),
            8,
            "duplicate key `a`",
        ),
        (r#"{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4, "invalid tensor name"),
        (r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#, 4, "unknown dtype"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4, "end before they begin"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4, "8 bytes"),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4, "-1"),
        (r#"{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#, 4, "floating point"),
        (
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}"#,
            4,
            "2^61",
        ),
        (r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#, 1, "whole number"),
        (
            concat!(
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"#,
                r#""b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            ),
            3,
            "overlaps",
        ),
        (
            concat!(
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"#,
                r#""b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}"#,
            ),
            5,
            "gap",
        ),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 3, "after the last tensor"),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":1}}"#, 2, "unknown field"),
    ];
    for (header, data_len, reason) in cases {
        let error = read_one(&safetensors(header, data_len)).expect_err(header);
        assert_eq!(error.kind(), ErrorKind::BadFile, "{error}");
        assert!(error.to_string().contains(reason), "{header}: {error}");
    }
}

#[test]
fn a_lenient_reader_accepts_exactly_what_the_library_accepts() {
    let dims = ["1"; 200].join(",");
    let deep = format!(r#"{{"a":{{"dtype":"U8","shape":[{dims}],"data_offsets":[0,1]}}}}"#);
    let accepted = [
        (r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, ""),
        ("{\"a\\u0000\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "a\0"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":[{}]}}"#, "a"),
        (
            concat!(
                r#"{"a":{"dtype":"F64","shape":[9],"data_offsets":[4,7]},"#,
                r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            ),
            "a",
        ),
        (
            concat!(
                r#"{"__metadata__":{"k":"1","k":"2"},"#,
                r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            ),
            "a",
        ),
        (r#"{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, "a"),
        ("\r\n{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "a"),
        (&deep, "a"),
    ];
    for (header, name) in accepted {
        let file = safetensors(header, 1);
        assert!(read_one(&file).is_err(), "{header}");
        let catalog = Catalog::from_bytes_lenient("m", &file).expect(header);
        let tensor = catalog.require(name).unwrap();
        assert_eq!(
            (catalog.tensors().len(), tensor.range().len, tensor.dtype()),
            (1, 1, Dtype::U8)
        );
        assert!(catalog.files()[0].metadata.get("k").is_none_or(|value| value == "2"));
    }
    for header in [r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#, "{}", "[]"] {
        assert!(Catalog::from_bytes_lenient("m", &safetensors(header, 1)).is_err(), "{header}");
    }
}

#[test]
fn an_excessive_header_length_is_refused() {
    let mut file = u64::MAX.to_le_bytes().to_vec();
    file.extend_from_slice(b"{}");
    assert!(matches!(read_one(&file), Err(Error::BadHeader { offset: 0, .. })));
}

fn shard(tensor: &str) -> Vec<u8> {
    safetensors(&format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#), 4)
}

fn sharded(index: &str) -> Result<Catalog, Error> {
    let files = BTreeMap::from([
        ("i".to_string(), index.as_bytes().to_vec()),
        ("s1".to_string(), shard("x")),
        ("s2".to_string(), shard("y")),
    ]);
    read(CatalogReader::sharded("i"), &files)
}

#[test]
fn a_shard_index_combines_its_shards() {
    let catalog = sharded(r#"{"metadata":{},"weight_map":{"x":"s1","y":"s2"}}"#).unwrap();
    let files: Vec<_> = catalog.tensors().map(|t| (t.name(), t.range().file.0)).collect();
    assert_eq!(files, [("x", 0), ("y", 1)]);
}

#[test]
fn an_invalid_shard_index_is_refused() {
    let missing = sharded(r#"{"weight_map":{"x":"s1","z":"s2"}}"#).unwrap_err();
    assert_eq!(
        missing,
        Error::MissingFromShard { file: "s2".into(), tensor: "z".into(), index: "i".into() }
    );
    for index in [r#"{"weight_map":{}}"#, r#"{"weight_map":{"x":"../s1"}}"#, r#"{}"#, "nonsense"] {
        assert!(matches!(sharded(index), Err(Error::BadHeader { .. })), "{index}");
    }
}

#[test]
fn a_reader_that_failed_returns_no_catalog() {
    let index = r#"{"weight_map":{"a":"1","b":"2"}}"#;
    let mut reader = CatalogReader::sharded("i.json");
    reader.feed(index.as_bytes(), index.len() as u64).unwrap();
    let first = shard("a");
    for range in [0..8, 8..first.len() - 4] {
        reader.feed(&first[range], first.len() as u64).unwrap();
    }
    assert!(reader.feed(b"[]", 2).is_err(), "the second shard is not a safetensors file");
    assert_eq!(reader.need(), None);
    assert!(matches!(reader.feed(b"", 0), Err(Error::Incomplete { .. })));
    assert!(matches!(reader.finish(), Err(Error::Incomplete { .. })));
}

#[test]
fn assemble_validates_ranges() {
    let catalog = read_one(&safetensors(TWO, 16)).unwrap();
    let end = catalog.files()[0].len;
    let meta = || TensorMeta { dtype: Dtype::U8, shape: vec![8] };
    let part = |offset, len| ByteRange { file: FileId(0), offset, len };
    assert!(catalog.assemble("t", meta(), vec![part(end - 4, 4), part(end - 12, 4)]).is_ok());
    for parts in [vec![part(0, 4)], vec![part(end - 4, 8)], vec![part(u64::MAX, 8)]] {
        let error = catalog.assemble("t", meta(), parts).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
    }
}

proptest! {
    /// Reading any header returns an error, or a catalog whose ranges are within the file.
    #[test]
    fn no_header_causes_a_panic_or_an_out_of_bounds_range(json in HEADER, data in 0usize..32) {
        let file = safetensors(&json, data);
        let len = file.len() as u64;
        if let Ok(catalog) = read_one(&file) {
            for t in catalog.tensors() {
                prop_assert!(t.range().offset + t.range().len <= len);
            }
        }
    }

    #[test]
    fn headers_round_trip(
        shapes in prop::collection::vec(prop::collection::vec(0u64..5, 0..4), 0..8),
    ) {
        let (mut fields, mut at) = (Vec::new(), 0u64);
        for (i, shape) in shapes.iter().enumerate() {
            let len = shape.iter().product::<u64>() * 2;
            fields.push(format!(
                r#""t{i}":{{"dtype":"F16","shape":{shape:?},"data_offsets":[{at},{}]}}"#,
                at + len
            ));
            at += len;
        }
        let header = format!("{{{}}}", fields.join(","));
        let catalog = read_one(&safetensors(&header, at as usize)).unwrap();
        for (i, shape) in shapes.iter().enumerate() {
            prop_assert_eq!(catalog.tensor(&format!("t{i}")).unwrap().shape(), &shape[..]);
        }
    }
}
