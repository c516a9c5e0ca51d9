// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a call gives, known by what its arguments are like: looked up, where it was found out
//! before.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;

use crate::Value;

/// How numbers count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalarKeying {
    /// By what they are: operators that make tensors of nothing else.
    ByValue,
    /// By their kind: what an operator gives is like does not depend on them, but for its dtype.
    /// Whole numbers count by what they are all the same, for they are dimensions and sizes.
    ByKind,
}

/// Puts together what a call's outputs depend on: all of its arguments, but for the numbers of its
/// storages, of which only counts which are the same; so that an operator that writes to an
/// argument it also reads is not taken for one that does not.
#[derive(Debug, Default)]
pub struct Signature {
    context: [u32; 3],
    bytes: Vec<u8>,
    storages: Vec<u64>,
}

impl Signature {
    /// Of calls with this in common, whatever the numbers mean to who asks: the operator, and what
    /// else its outputs depend on.
    pub fn within(context: [u32; 3]) -> Self {
        Self { context, ..Self::default() }
    }

    /// The signature of arguments, in their order, with their names where they have some.
    pub fn of<'a>(
        &mut self,
        arguments: impl Iterator<Item = (&'a str, &'a Value)>,
        scalars: ScalarKeying,
    ) -> &[u8] {
        self.bytes.clear();
        self.context.iter().for_each(|number| self.bytes.extend_from_slice(&number.to_le_bytes()));
        self.storages.clear();
        for (name, value) in arguments {
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(0);
            self.add(value, scalars);
        }
        &self.bytes
    }

    fn add(&mut self, value: &Value, scalars: ScalarKeying) {
        match value {
            Value::Tensor(tensor) | Value::Conjugate(tensor) => {
                let known = self.storages.iter().position(|&storage| storage == tensor.storage);
                let storage = known.unwrap_or_else(|| {
                    self.storages.push(tensor.storage);
                    self.storages.len() - 1
                });
                self.bytes.push(if matches!(value, Value::Conjugate(_)) { b'C' } else { b'T' });
                self.bytes.extend_from_slice(&(storage as u32).to_le_bytes());
                tensor.view.encode(&mut self.bytes);
            }
            Value::List(values) => {
                self.bytes.push(b'[');
                self.bytes.extend_from_slice(&(values.len() as u32).to_le_bytes());
                values.iter().for_each(|value| self.add(value, scalars));
            }
            Value::Float(_) if scalars == ScalarKeying::ByKind => self.bytes.push(b'f'),
            Value::Complex(..) if scalars == ScalarKeying::ByKind => self.bytes.push(b'c'),
            Value::Scalar { dtype, .. } if scalars == ScalarKeying::ByKind => {
                self.bytes.extend_from_slice(&[b's', dtype.0]);
            }
            value => {
                self.bytes.push(b'v');
                value.encode(&mut self.bytes);
            }
        }
    }
}

/// What a cache has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Lookups that found something.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// How many things it has.
    pub entries: usize,
}

/// A cache that keeps what was used of late: at most twice its capacity, of which the half that was
/// not asked for goes when it is full.
#[derive(Debug)]
pub struct SignatureCache<K, V> {
    capacity: usize,
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    hits: u64,
    misses: u64,
}

impl<K: Hash + Eq + Clone, V: Clone> SignatureCache<K, V> {
    /// One that keeps at least the `capacity` things that were asked for last.
    pub fn new(capacity: usize) -> Self {
        let (young, old) = Default::default();
        Self { capacity: capacity.max(1), young, old, hits: 0, misses: 0 }
    }

    /// What is known.
    pub fn get<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        if let Some(value) = self.young.get(key) {
            self.hits += 1;
            return Some(value.clone());
        }
        let Some((key, value)) = self.old.remove_entry(key) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.put(key, value.clone());
        Some(value)
    }

    /// Keeps what was found out.
    pub fn put(&mut self, key: K, value: V) {
        if self.young.len() >= self.capacity {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    /// What it has done.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits,
            misses: self.misses,
            entries: self.young.len() + self.old.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ScalarType, StorageView, TensorRef};

    fn tensor(storage: u64, sizes: &[u64]) -> Value {
        Value::Tensor(TensorRef {
            storage,
            view: StorageView::contiguous(ScalarType(6), sizes.to_vec()),
        })
    }

    fn signature(values: &[Value], scalars: ScalarKeying) -> Vec<u8> {
        Signature::default().of(values.iter().map(|value| ("", value)), scalars).to_vec()
    }

    #[test]
    fn storages_count_by_which_are_the_same_and_numbers_by_their_kind() {
        let of = |values: &[Value]| signature(values, ScalarKeying::ByKind);
        let (x, y) = (tensor(3, &[2, 3]), tensor(9, &[2, 3]));
        assert_eq!(of(&[x.clone(), y.clone()]), of(&[y.clone(), tensor(4, &[2, 3])]));
        assert_ne!(of(&[x.clone(), y.clone()]), of(&[x.clone(), x.clone()]));
        assert_ne!(of(std::slice::from_ref(&x)), of(&[tensor(3, &[3, 2])]));
        assert_eq!(of(&[x.clone(), Value::Float(1.0)]), of(&[x.clone(), Value::Float(2.0)]));
        assert_ne!(of(&[x.clone(), Value::Int(1)]), of(&[x.clone(), Value::Int(2)]));
        assert_ne!(of(&[x.clone(), Value::Int(1)]), of(&[x.clone(), Value::Bool(true)]));
        let by_value = |value| signature(&[Value::Float(value)], ScalarKeying::ByValue);
        assert_ne!(by_value(1.0), by_value(2.0));
        let (flat, nested) = (Value::List(vec![x.clone(), y.clone()]), Value::List(vec![x]));
        assert_ne!(of(&[flat]), of(&[nested, y]));
    }

    proptest! {
        #[test]
        fn it_never_forgets_what_it_must_keep_nor_keeps_more_than_it_may(
            keys in prop::collection::vec(0u32..40, 1..300), capacity in 1usize..12,
        ) {
            let mut cache = SignatureCache::<u32, u32>::new(capacity);
            let mut recent: Vec<u32> = Vec::new();
            for key in keys {
                let found = cache.get(&key);
                recent.retain(|&other| other != key);
                prop_assert!(found.is_none_or(|found| found == key * 2));
                if found.is_none() {
                    cache.put(key, key * 2);
                }
                recent.push(key);
                // The `capacity` that were used last are there.
                for &last in recent.iter().rev().take(capacity) {
                    let there = cache.young.contains_key(&last) || cache.old.contains_key(&last);
                    prop_assert!(there, "{last} of {recent:?}");
                }
                prop_assert!(cache.stats().entries <= 2 * capacity);
            }
        }
    }
}
