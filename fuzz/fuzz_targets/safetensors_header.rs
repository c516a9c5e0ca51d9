// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares readers of safetensors headers with the safetensors library, on arbitrary headers. A
//! lenient reader accepts exactly what the library accepts. A strict reader accepts no more. All
//! readers find the same tensors in an accepted header.
#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use ts_format::Catalog;

fuzz_target!(|input: (u8, &[u8])| {
    // The length field is always correct, because readers reject most other lengths at once. The
    // fuzzer chooses the length of the data.
    let (data_len, header) = input;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + usize::from(data_len), 0);
    let theirs = SafeTensors::deserialize(&file);
    let lenient = Catalog::from_bytes_lenient("m", &file);
    assert_eq!(lenient.is_ok(), theirs.is_ok(), "{lenient:?}, {theirs:?}");
    let (Ok(lenient), Ok(theirs)) = (lenient, theirs) else {
        return assert!(
            Catalog::from_bytes("m", &file).is_err(),
            "a strict reader accepts only what the library accepts"
        );
    };
    compare(&file, &lenient, &theirs);
    if let Ok(strict) = Catalog::from_bytes("m", &file) {
        compare(&file, &strict, &theirs);
    }
});

fn compare(file: &[u8], catalog: &Catalog, theirs: &SafeTensors<'_>) {
    assert_eq!(catalog.tensors().len(), theirs.len());
    for tensor in catalog.tensors() {
        let part = tensor.range();
        let ours = &file[part.offset as usize..(part.offset + part.len) as usize];
        let view = theirs.tensor(tensor.name()).expect("both readers list the same tensors");
        assert_eq!(ours.as_ptr_range(), view.data().as_ptr_range());
        assert_eq!(tensor.dtype().name(), view.dtype().to_string());
        assert!(tensor.shape().iter().copied().eq(view.shape().iter().map(|&n| n as u64)));
    }
}
