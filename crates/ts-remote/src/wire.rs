// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bodies of HELLO and META: fields, each with a tag and a length, so that what is not known
//! can be skipped.

use crate::Error;

/// Of a tag: who does not know the field must not go on without it.
const MUST_KNOW: u8 = 0x80;

/// Puts fields together.
#[derive(Debug, Default)]
pub(crate) struct FieldWriter {
    bytes: Vec<u8>,
}

impl FieldWriter {
    pub(crate) fn field(&mut self, tag: u8, value: &[u8]) -> &mut Self {
        let len = u32::try_from(value.len()).expect("fields are short");
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

/// The fields of a body, in their order.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
    stream: u32,
}

/// One field.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a> {
    pub(crate) tag: u8,
    value: &'a [u8],
    stream: u32,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(body: &'a [u8], stream: u32) -> Self {
        Self { rest: body, stream }
    }

    pub(crate) fn next(&mut self) -> Result<Option<Field<'a>>, Error> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let cut =
            || Error::Protocol { stream: self.stream, what: "a field that is cut off".into() };
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
        let bytes = self.value.try_into().map_err(|_| self.bad("is no number"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn numbers(&self) -> Result<impl Iterator<Item = u64> + use<'a>, Error> {
        let (numbers, rest) = self.value.as_chunks::<8>();
        let whole =
            rest.is_empty().then_some(numbers).ok_or_else(|| self.bad("is no list of numbers"))?;
        Ok(whole.iter().map(|bytes| u64::from_le_bytes(*bytes)))
    }

    pub(crate) fn text(&self) -> Result<&'a str, Error> {
        std::str::from_utf8(self.value).map_err(|_| self.bad("is no text"))
    }

    /// Two texts: the first with its length before it.
    pub(crate) fn pair(&self) -> Result<(&'a str, &'a str), Error> {
        let cut = || self.bad("is no pair");
        let (len, rest) = self.value.split_first_chunk::<4>().ok_or_else(cut)?;
        let (first, second) =
            rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(cut)?;
        let text = |value| Self { value, ..*self }.text();
        Ok((text(first)?, text(second)?))
    }

    /// A field that this version does not know.
    pub(crate) fn skip(&self) -> Result<(), Error> {
        match self.tag & MUST_KNOW {
            0 => Ok(()),
            _ => Err(self.bad("is not known here, and may not be skipped")),
        }
    }

    fn bad(&self, what: &str) -> Error {
        Error::Protocol { stream: self.stream, what: format!("field {:#04x} {what}", self.tag) }
    }
}

/// As [`Field::pair`] reads it.
pub(crate) fn pair(first: &str, second: &str) -> Vec<u8> {
    let len = u32::try_from(first.len()).expect("fields are short").to_le_bytes();
    [&len, first.as_bytes(), second.as_bytes()].concat()
}
