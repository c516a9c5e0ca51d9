// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signatures of calls, and a cache for facts about their results.
//!
//! For most operators, the shapes and dtypes of the results depend only on the signature of the
//! call. So a client computes them once for each signature, and then looks them up.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;

use crate::Value;

/// How numbers among the arguments are included in a [`Signature`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalarKeying {
    /// By value. For operators such as `arange`, whose results have shapes that depend on floats.
    ByValue,
    /// By kind: floats and complex numbers are included only with their kind, and scalar tensors
    /// only with their dtype. Integers and booleans are still included by value, because they may
    /// be dimensions and sizes.
    ByKind,
}

/// Computes the signature of a call as a byte string. Calls with equal signatures have results of
/// equal shapes and dtypes, unless these depend on the elements of tensors.
///
/// A signature contains the layout of each tensor, and which tensors share a storage. It does not
/// contain the numbers of the storages. So `x + x` and `x + y` have different signatures.
///
/// [`compute`](Self::compute) reuses the buffers of the previous call.
///
/// # Examples
///
/// ```
/// use ts_exec::{ScalarKeying, ScalarType, Signature, StorageView, TensorRef, Value};
///
/// let tensor = |storage| {
///     let view = StorageView::contiguous(ScalarType::FLOAT32, vec![2, 3]);
///     ("", Value::Tensor(TensorRef { storage, view }))
/// };
/// let signature = |arguments: &[(&str, Value)]| {
///     let arguments = arguments.iter().map(|(name, value)| (*name, value));
///     Signature::new([0; 3]).compute(arguments, ScalarKeying::ByKind).to_vec()
/// };
///
/// // `x + y` has the signature of `u + v`, but not that of `x + x`.
/// let (x, y, u, v) = (tensor(1), tensor(2), tensor(3), tensor(4));
/// let sum = signature(&[x.clone(), y]);
/// assert_eq!(sum, signature(&[u, v]));
/// assert_ne!(sum, signature(&[x.clone(), x]));
/// ```
#[derive(Debug, Default)]
pub struct Signature {
    context: [u32; 3],
    bytes: Vec<u8>,
    /// The storages of this call, in the order of their first use.
    storages: Vec<u64>,
}

impl Signature {
    /// Creates a signature for calls with this context: the operator, and whatever else the results
    /// depend on. The caller chooses the meaning of the numbers.
    pub fn new(context: [u32; 3]) -> Self {
        Self { context, ..Self::default() }
    }

    /// Returns the signature of a call with these arguments, in order. The name of a positional
    /// argument is empty. `scalars` selects how numbers among the arguments are included.
    pub fn compute<'a>(
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
                let seen = self.storages.iter().position(|&storage| storage == tensor.storage);
                let index = seen.unwrap_or_else(|| {
                    self.storages.push(tensor.storage);
                    self.storages.len() - 1
                });
                self.bytes.push(if matches!(value, Value::Conjugate(_)) { b'C' } else { b'T' });
                self.bytes.extend_from_slice(&(index as u32).to_le_bytes());
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

/// Counters of a [`SignatureCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// The number of lookups that found an entry.
    pub hits: u64,
    /// The number of lookups that found no entry.
    pub misses: u64,
    /// The current number of entries.
    pub entries: usize,
}

/// A cache that evicts entries that have not been used recently.
///
/// It has two generations of `capacity` entries each. Entries that are used move to the young
/// generation. When the young generation is full, it becomes the old generation, and the previous
/// old generation is evicted.
///
/// # Examples
///
/// ```
/// use ts_exec::SignatureCache;
///
/// let mut cache = SignatureCache::<String, u32>::new(1000);
/// assert_eq!(cache.get("signature"), None);
/// cache.put("signature".into(), 7);
/// assert_eq!(cache.get("signature"), Some(7));
/// assert_eq!((cache.stats().hits, cache.stats().misses), (1, 1));
/// ```
#[derive(Debug)]
pub struct SignatureCache<K, V> {
    capacity: usize,
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    hits: u64,
    misses: u64,
}

impl<K: Hash + Eq + Clone, V: Clone> SignatureCache<K, V> {
    /// Creates a cache that keeps at least the `capacity` most recently used entries, and at most
    /// twice as many.
    pub fn new(capacity: usize) -> Self {
        let (young, old) = Default::default();
        Self { capacity: capacity.max(1), young, old, hits: 0, misses: 0 }
    }

    /// Returns a clone of the entry for `key`, and marks the entry as recently used.
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

    /// Adds an entry. If the young generation is full, evicts the old generation.
    pub fn put(&mut self, key: K, value: V) {
        if self.young.len() >= self.capacity {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    /// Returns the counters.
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
        Signature::default().compute(values.iter().map(|value| ("", value)), scalars).to_vec()
    }

    #[test]
    fn a_signature_ignores_storage_numbers_and_float_values() {
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
        fn recently_used_entries_stay_within_twice_the_capacity(
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
                for &last in recent.iter().rev().take(capacity) {
                    let kept = cache.young.contains_key(&last) || cache.old.contains_key(&last);
                    prop_assert!(kept, "{last} of {recent:?}");
                }
                prop_assert!(cache.stats().entries <= 2 * capacity);
            }
        }
    }
}
