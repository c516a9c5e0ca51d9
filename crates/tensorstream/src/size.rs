// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sizes in bytes as text, such as `600MiB`.

/// The text is not a size that [`parse_bytes`] accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid size {0:?}: expected bytes, or a number with a unit such as 600MiB or 1.5GB")]
pub struct ParseSizeError(String);

/// Parses a size in bytes: a number with an optional unit, case-insensitive. B, KB, MB, GB and TB,
/// also without the B, are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024. Fractions of a
/// byte are dropped.
///
/// # Errors
/// Returns [`ParseSizeError`] for any other text, for negative or non-finite numbers, and for sizes
/// of 1.8e19 bytes or more.
///
/// # Examples
/// ```
/// assert_eq!(tensorstream::parse_bytes("600MiB"), Ok(600 << 20));
/// assert_eq!(tensorstream::parse_bytes("1.5 GB"), Ok(1_500_000_000));
/// assert!(tensorstream::parse_bytes("12 parsecs").is_err());
/// ```
pub fn parse_bytes(text: &str) -> Result<u64, ParseSizeError> {
    const UNITS: [(&str, f64); 13] = [
        ("kib", 1024.0),
        ("mib", 1048576.0),
        ("gib", 1073741824.0),
        ("tib", 1099511627776.0),
        ("kb", 1e3),
        ("mb", 1e6),
        ("gb", 1e9),
        ("tb", 1e12),
        ("b", 1.0),
        ("k", 1e3),
        ("m", 1e6),
        ("g", 1e9),
        ("t", 1e12),
    ];
    let lower = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|(unit, scale)| Some((lower.strip_suffix(unit)?, *scale)));
    let (number, scale) = unit.unwrap_or((&lower, 1.0));
    let bytes = number.trim().parse::<f64>().map(|n| n * scale);
    match bytes {
        Ok(n) if (0.0..1.8e19).contains(&n) => Ok(n as u64),
        _ => Err(ParseSizeError(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        for (text, bytes) in [
            ("600MiB", 600 << 20),
            ("0.5 GiB", 512 << 20),
            ("1.5GB", 1_500_000_000),
            ("4096", 4096),
            ("10b", 10),
            (" 2kb ", 2000),
            ("6G", 6_000_000_000),
            ("0.5m", 500_000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1GB", "1e400", "nan", "12 parsecs", "1 2"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
