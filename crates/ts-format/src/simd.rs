// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loops over bytes, compiled for the widest vectors that the processor turns out to have. This
//! crate's one unsafe module: the loops themselves are safe code, which compilers make vector
//! instructions of.

/// Puts floats together from their planes: plane `i` has byte `i` of each element, as it is after a
/// rotation left by one bit. As many elements as there are, of as many bytes as there are planes.
///
/// # Panics
/// When a plane is shorter than there are elements.
pub(crate) fn merge<const W: usize>(planes: [&[u8]; W], elements: &mut [[u8; W]]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        return unsafe { merge_avx2(planes, elements) };
    }
    merge_any(planes, elements);
}

/// A fifth faster for four planes than with the vectors that every x86-64 has.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn merge_avx2<const W: usize>(planes: [&[u8]; W], elements: &mut [[u8; W]]) {
    merge_any(planes, elements);
}

#[inline(always)]
fn merge_any<const W: usize>(planes: [&[u8]; W], elements: &mut [[u8; W]]) {
    let planes = planes.map(|plane| &plane[..elements.len()]);
    for (i, element) in elements.iter_mut().enumerate() {
        *element = rotate_right(planes.map(|plane| plane[i]));
    }
}

/// By one bit, least significant byte first. Whatever is not of this width is known when it is
/// compiled, and gone.
#[inline(always)]
fn rotate_right<const W: usize>(bytes: [u8; W]) -> [u8; W] {
    let mut rotated = [0; W];
    match *bytes.as_slice() {
        [a, b] => {
            rotated.copy_from_slice(&u16::from_le_bytes([a, b]).rotate_right(1).to_le_bytes());
        }
        [a, b, c, d] => {
            rotated
                .copy_from_slice(&u32::from_le_bytes([a, b, c, d]).rotate_right(1).to_le_bytes());
        }
        [a, b, c, d, e, f, g, h] => {
            let element = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            rotated.copy_from_slice(&element.rotate_right(1).to_le_bytes());
        }
        _ => unreachable!("floats have two, four or eight bytes"),
    }
    rotated
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any number of elements, also those that fill no vector.
    #[test]
    fn vectors_do_what_the_plain_loop_does() {
        fn check<const W: usize>() {
            let bytes: Vec<u8> =
                (0..200 * W as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
            for count in 0..200 {
                let planes: [&[u8]; W] = std::array::from_fn(|i| &bytes[i * 200..][..count]);
                let mut elements = vec![[0; W]; count];
                merge(planes, &mut elements);
                for (i, element) in elements.iter().enumerate() {
                    assert_eq!(*element, rotate_right(planes.map(|plane| plane[i])));
                }
            }
        }
        check::<2>();
        check::<4>();
        check::<8>();
    }
}
