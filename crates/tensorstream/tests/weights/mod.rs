// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints with weights that compress.

use std::path::Path;

/// Returns the bytes of a unit: bf16 values with few exponents, like weights.
pub(crate) fn weights_of(unit: usize, len: usize) -> Vec<u8> {
    let mut state = unit as u32 + 1;
    let mut value = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (random, exponent) = (state >> 16, 118 + (state >> 9 & 3));
        ((random & 0x807f) as u16 | (exponent << 7) as u16).to_le_bytes()
    };
    (0..len / 2).flat_map(&mut value).collect()
}

/// Writes a safetensors file with a bf16 tensor for each unit.
pub(crate) fn write_units(path: &Path, units: &[Vec<u8>]) {
    let mut begin = 0;
    let tensor = |(i, unit): (usize, &Vec<u8>)| {
        let (len, end) = (unit.len() / 2, begin + unit.len());
        let offsets = [std::mem::replace(&mut begin, end), end];
        format!(r#""u{i}.weight":{{"dtype":"BF16","shape":[{len}],"data_offsets":{offsets:?}}}"#)
    };
    let mut header =
        format!("{{{}}}", units.iter().enumerate().map(tensor).collect::<Vec<_>>().join(","));
    // As the safetensors library does, so that the data is aligned.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    units.iter().for_each(|bytes| file.extend(bytes));
    std::fs::write(path, file).unwrap();
}
