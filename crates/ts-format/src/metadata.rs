// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, DerefMut};

use indexmap::IndexMap;
use serde::Serialize;

/// The key of the only entry of a `.ts` file whose metadata is stated, but empty.
const EMPTY: &str = "tensorstream.empty";

/// The metadata of a file: text by key, in the order of the file.
///
/// Two values are equal if they have the same entries in any order.
///
/// ```
/// use ts_format::Metadata;
///
/// let mut metadata =
///     Metadata::from([("step".into(), "9".into()), ("format".into(), "pt".into())]);
/// metadata.insert("author".into(), "me".into());
/// assert_eq!(metadata.keys().collect::<Vec<_>>(), ["step", "format", "author"]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: IndexMap<String, String>,
    is_stated: bool,
}

impl Metadata {
    /// Returns metadata without entries that is written nevertheless: a safetensors file can have
    /// an empty object of metadata.
    pub fn stated() -> Self {
        Self { entries: IndexMap::new(), is_stated: true }
    }

    /// Returns whether a safetensors file has an object of metadata. It may be empty.
    pub fn is_stated(&self) -> bool {
        self.is_stated || !self.entries.is_empty()
    }

    /// Returns the entries of a `.ts` file, in which each is a key and its text.
    pub(crate) fn stored(&self) -> Vec<(&str, &str)> {
        match self.is_stated && self.entries.is_empty() {
            true => vec![(EMPTY, "")],
            false => self.entries.iter().map(|(key, value)| (&**key, &**value)).collect(),
        }
    }

    /// Returns the metadata with these entries of a `.ts` file.
    pub(crate) fn from_stored(entries: IndexMap<String, String>) -> Self {
        match entries.len() == 1 && entries.get(EMPTY).is_some_and(String::is_empty) {
            true => Self::stated(),
            false => Self { entries, is_stated: false },
        }
    }
}

impl Deref for Metadata {
    type Target = IndexMap<String, String>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl DerefMut for Metadata {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.entries
    }
}

impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Eq for Metadata {}

impl Serialize for Metadata {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.entries.serialize(serializer)
    }
}

impl<const N: usize> From<[(String, String); N]> for Metadata {
    fn from(entries: [(String, String); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl FromIterator<(String, String)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(entries: I) -> Self {
        Self { entries: entries.into_iter().collect(), is_stated: false }
    }
}

impl<'a> IntoIterator for &'a Metadata {
    type Item = (&'a String, &'a String);
    type IntoIter = indexmap::map::Iter<'a, String, String>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}

impl IntoIterator for Metadata {
    type Item = (String, String);
    type IntoIter = indexmap::map::IntoIter<String, String>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}
