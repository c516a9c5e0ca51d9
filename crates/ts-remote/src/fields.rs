// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bodies that consist of fields. Each field has a tag and a length, so that readers can skip
//! unknown fields.

use crate::Error;

/// The bit of a tag that marks a mandatory field. A reader that does not support the field must
/// reject the body.
const MANDATORY: u8 = 0x80;

/// Writes a body of fields.
#[derive(Debug, Default)]
pub(crate) struct FieldWriter {
    bytes: Vec<u8>,
}

impl FieldWriter {
    /// Appends a field.
    ///
    /// # Panics
    /// Panics if `value` has 4 GiB or more.
    pub(crate) fn field(&mut self, tag: u8, value: &[u8]) -> &mut Self {
        let len = u32::try_from(value.len()).expect("callers pass values shorter than 4 GiB");
        self.bytes.push(tag);
        self.bytes.extend_from_slice(&len.to_le_bytes());
        self.bytes.extend_from_slice(value);
        self
    }

    pub(crate) fn number(&mut self, tag: u8, value: u64) -> &mut Self {
        self.field(tag, &value.to_le_bytes())
    }

    pub(crate) fn numbers(&mut self, tag: u8, values: impl Iterator<Item = u64>) -> &mut Self {
        let bytes: Vec<u8> = values.flat_map(u64::to_le_bytes).collect();
        self.field(tag, &bytes)
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads the fields of a body in order.
#[derive(Debug)]
pub(crate) struct FieldReader<'a> {
    rest: &'a [u8],
    stream: u32,
}

/// A field of a body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a> {
    pub(crate) tag: u8,
    value: &'a [u8],
    stream: u32,
}

impl<'a> FieldReader<'a> {
    pub(crate) fn new(body: &'a [u8], stream: u32) -> Self {
        Self { rest: body, stream }
    }

    /// Returns the next field, or `None` at the end of the body.
    pub(crate) fn next(&mut self) -> Result<Option<Field<'a>>, Error> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let cut =
            || Error::Protocol { stream: self.stream, what: "received a truncated field".into() };
        let ([tag, len @ ..], rest) = self.rest.split_first_chunk::<5>().ok_or_else(cut)?;
        let (value, rest) =
            rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(cut)?;
        self.rest = rest;
        Ok(Some(Field { tag: *tag, value, stream: self.stream }))
    }
}

impl<'a> Field<'a> {
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.value
    }

    pub(crate) fn number(&self) -> Result<u64, Error> {
        let len = self.value.len();
        let bytes = self
            .value
            .try_into()
            .map_err(|_| self.bad(&format!("has {len} bytes (expected 8)")))?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn numbers(&self) -> Result<impl Iterator<Item = u64> + use<'a>, Error> {
        let (numbers, rest) = self.value.as_chunks::<8>();
        let whole = rest.is_empty().then_some(numbers).ok_or_else(|| {
            self.bad(&format!("has {} bytes (expected a multiple of 8)", self.value.len()))
        })?;
        Ok(whole.iter().map(|bytes| u64::from_le_bytes(*bytes)))
    }

    pub(crate) fn text(&self) -> Result<&'a str, Error> {
        std::str::from_utf8(self.value).map_err(|_| self.bad("is not UTF-8"))
    }

    /// Returns the key and the value that [`key_value`] encoded.
    pub(crate) fn key_value(&self) -> Result<(&'a str, &'a str), Error> {
        let cut = || self.bad("is not a key followed by a value");
        let (len, rest) = self.value.split_first_chunk::<4>().ok_or_else(cut)?;
        let (key, value) =
            rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(cut)?;
        let text = |value| Self { value, ..*self }.text();
        Ok((text(key)?, text(value)?))
    }

    /// Skips a field that this version does not support.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the field is mandatory.
    pub(crate) fn skip(&self) -> Result<(), Error> {
        match self.tag & MANDATORY {
            0 => Ok(()),
            _ => Err(self.bad(concat!(
                "is mandatory, but tensorstream ",
                env!("CARGO_PKG_VERSION"),
                " does not support it"
            ))),
        }
    }

    fn bad(&self, what: &str) -> Error {
        let what = format!("received field {:#04x}, which {what}", self.tag);
        Error::Protocol { stream: self.stream, what }
    }
}

/// Encodes a key-value pair as the value of one field.
pub(crate) fn key_value(key: &str, value: &str) -> Vec<u8> {
    let len = u32::try_from(key.len()).expect("callers pass keys shorter than 4 GiB").to_le_bytes();
    [&len, key.as_bytes(), value.as_bytes()].concat()
}
