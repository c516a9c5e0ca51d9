// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// The element type of a tensor: every dtype that safetensors names, in the order of that
        /// library, which lays files out by it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// All dtypes, in order.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// The name that safetensors headers use.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Width of one element in bits; under 8 for the packed microscaling types.
            pub const fn bits(self) -> u32 {
                match self { $(Dtype::$variant => $bits,)* }
            }

            /// Its code in `.ts` files: its place in this list, for ever.
            pub(crate) const fn code(self) -> u8 {
                self as u8
            }

            pub(crate) fn from_code(code: u8) -> Option<Dtype> {
                Self::ALL.get(usize::from(code)).copied()
            }

            /// The dtype with this safetensors name.
            pub fn from_name(name: &str) -> Option<Dtype> {
                match name { $($name => Some(Dtype::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    /// One byte per element, 0 or 1.
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
    /// Complex of two f32, real part first.
    C64 = "C64", 64;
    /// IEEE double precision.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

impl Dtype {
    /// Length in bytes of a tensor of this shape, or `None` if it does not fit in 64 bits or is not
    /// a whole number of bytes.
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
    fn every_name_finds_its_dtype_again() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("float32"), None);
    }
}
