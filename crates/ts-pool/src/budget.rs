// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Error;

/// A hard limit on bytes that several owners of memory share. Cloning gives another handle to the
/// same account.
#[derive(Debug, Clone)]
pub struct Budget {
    account: Arc<Account>,
}

#[derive(Debug)]
struct Account {
    limit: usize,
    used: AtomicUsize,
    high_water: AtomicUsize,
}

impl Budget {
    /// An account of `limit_bytes`, all free.
    pub fn new(limit_bytes: usize) -> Self {
        let account = Account {
            limit: limit_bytes,
            used: AtomicUsize::new(0),
            high_water: AtomicUsize::new(0),
        };
        Self { account: Arc::new(account) }
    }

    /// Takes `bytes` from the account until the reservation is dropped. Never blocks.
    ///
    /// # Errors
    /// [`Error::OverBudget`] when fewer bytes are left; nothing is taken then.
    pub fn reserve(&self, bytes: usize) -> Result<Reservation, Error> {
        let account = &self.account;
        let taken = account.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= account.limit)
        });
        match taken {
            Ok(before) => {
                account.high_water.fetch_max(before + bytes, Ordering::AcqRel);
                Ok(Reservation { account: Arc::clone(account), bytes })
            }
            Err(used_bytes) => Err(Error::OverBudget {
                requested_bytes: bytes,
                used_bytes,
                limit_bytes: account.limit,
            }),
        }
    }

    /// The limit.
    pub fn limit_bytes(&self) -> usize {
        self.account.limit
    }

    /// Bytes reserved now.
    pub fn used_bytes(&self) -> usize {
        self.account.used.load(Ordering::Acquire)
    }

    /// The most that was reserved at any time.
    pub fn high_water_bytes(&self) -> usize {
        self.account.high_water.load(Ordering::Acquire)
    }
}

/// Bytes taken from a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    account: Arc<Account>,
    bytes: usize,
}

impl Reservation {
    /// How many bytes it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_gives_what_it_has_and_takes_it_back() {
        let budget = Budget::new(100);
        let a = budget.reserve(60).unwrap();
        assert!(matches!(budget.reserve(41), Err(Error::OverBudget { used_bytes: 60, .. })));
        assert!(budget.reserve(usize::MAX).is_err());
        drop(a);
        let _b = budget.reserve(100).unwrap();
        assert_eq!((budget.used_bytes(), budget.high_water_bytes()), (100, 100));
    }
}
