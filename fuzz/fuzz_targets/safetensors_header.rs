// SPDX-License-Identifier: MIT OR Apache-2.0
//! A safetensors header, whatever its bytes: a catalog within the file or an error; what is
//! accepted the safetensors library accepts too and reads alike; and a lenient reader accepts just
//! what the library does.
#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use ts_format::Catalog;

fuzz_target!(|input: (u8, &[u8])| {
    // The length field is made right: random ones are refused at once. The data's length is the
    // fuzzer's.
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
            "what is accepted the library \
            accepts"
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
        let here = &file[part.offset as usize..(part.offset + part.len) as usize];
        let there = theirs.tensor(tensor.name()).expect("it is listed");
        assert_eq!(here.as_ptr_range(), there.data().as_ptr_range());
        assert_eq!(tensor.dtype().name(), there.dtype().to_string());
        assert!(tensor.shape().iter().copied().eq(there.shape().iter().map(|&n| n as u64)));
    }
}
