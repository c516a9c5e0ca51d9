// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// The element type of a tensor.
        ///
        /// The dtypes are those of safetensors, and then those that it lacks. The order is that of
        /// the safetensors library, which stores the tensors of a file sorted by descending dtype.
        ///
        /// ```
        /// use ts_format::Dtype;
        ///
        /// let dtype = Dtype::from_name("BF16").expect("a safetensors dtype");
        /// assert_eq!((dtype, dtype.bits()), (Dtype::BF16, 16));
        /// assert_eq!(Dtype::F4.byte_len(&[2, 8]), Some(8));
        /// assert_eq!(Dtype::F4.byte_len(&[3]), None); // 12 bits
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// All dtypes, in the order of the enum.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// Returns the name, such as `BF16`. For dtypes of safetensors it is that of headers.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Returns the width of one element in bits. It is less than 8 for packed dtypes.
            pub const fn bits(self) -> u32 {
                match self { $(Dtype::$variant => $bits,)* }
            }

            /// Returns the code of the dtype in `.ts` files. Codes are positions in the enum, so
            /// the order must never change.
            pub(crate) const fn code(self) -> u8 {
                self as u8
            }

            pub(crate) fn from_code(code: u8) -> Option<Dtype> {
                Self::ALL.get(usize::from(code)).copied()
            }

            /// Returns the dtype with this name, or `None` if the name is unknown.
            pub fn from_name(name: &str) -> Option<Dtype> {
                match name { $($name => Some(Dtype::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    /// Boolean, one byte with the value 0 or 1.
    Bool = "BOOL", 8;
    /// 4-bit float of the OCP microscaling formats, two to a byte.
    F4 = "F4", 4;
    /// 6-bit float, 2 exponent and 3 mantissa bits.
    F6_E2M3 = "F6_E2M3", 6;
    /// 6-bit float, 3 exponent and 2 mantissa bits.
    F6_E3M2 = "F6_E3M2", 6;
    /// Unsigned 8-bit integer.
    U8 = "U8", 8;
    /// Signed 8-bit integer.
    I8 = "I8", 8;
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8_E5M2 = "F8_E5M2", 8;
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
    F8_E4M3 = "F8_E4M3", 8;
    /// 8-bit power-of-two scale of the microscaling formats.
    F8_E8M0 = "F8_E8M0", 8;
    /// 8-bit float E4M3, one NaN and no negative zero.
    F8_E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// 8-bit float E5M2, one NaN and no negative zero.
    F8_E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// IEEE half precision.
    F16 = "F16", 16;
    /// bfloat16: the upper half of an f32.
    BF16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// IEEE single precision.
    F32 = "F32", 32;
    /// Complex number of two f32, real part first.
    C64 = "C64", 64;
    /// IEEE double precision.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
    /// Complex number of two f16, real part first. Only in `.ts` files.
    C32 = "C32", 32;
    /// Complex number of two f64, real part first. Only in `.ts` files.
    C128 = "C128", 128;
}

impl Dtype {
    /// Returns whether safetensors files can contain this dtype.
    pub fn is_in_safetensors(self) -> bool {
        !matches!(self, Dtype::C32 | Dtype::C128)
    }

    /// Returns the length in bytes of a tensor of this shape. Returns `None` if the length is not a
    /// whole number of bytes, or if its number of bits does not fit in 64 bits (2^61 bytes or
    /// more).
    pub fn byte_len(self, shape: &[u64]) -> Option<u64> {
        let count = shape.iter().try_fold(1u64, |count, &n| count.checked_mul(n))?;
        let bits = count.checked_mul(u64::from(self.bits()))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Dtype;

    #[test]
    fn names_and_codes_round_trip() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("float32"), None);
    }
}
