// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Error;

/// A hard limit, in bytes, that several memory pools share. Clones are handles to the same budget.
///
/// # Examples
/// ```
/// use ts_pool::Budget;
///
/// let budget = Budget::new(100);
/// let reservation = budget.reserve(60)?;
/// assert!(budget.reserve(41).is_err());
/// drop(reservation);
/// assert_eq!((budget.used_bytes(), budget.high_water_bytes()), (0, 60));
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Budget {
    inner: Arc<BudgetInner>,
}

#[derive(Debug)]
struct BudgetInner {
    limit: usize,
    used: AtomicUsize,
    high_water: AtomicUsize,
}

impl Budget {
    /// Creates a budget of `limit_bytes` without reservations.
    pub fn new(limit_bytes: usize) -> Self {
        let inner = BudgetInner {
            limit: limit_bytes,
            used: AtomicUsize::new(0),
            high_water: AtomicUsize::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Reserves `bytes` bytes until the returned reservation is dropped. Never blocks.
    ///
    /// # Errors
    /// Returns [`Error::OverBudget`], and reserves nothing, if fewer than `bytes` bytes are
    /// unreserved.
    pub fn reserve(&self, bytes: usize) -> Result<Reservation, Error> {
        let inner = &self.inner;
        let taken = inner.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= inner.limit)
        });
        match taken {
            Ok(before) => {
                inner.high_water.fetch_max(before + bytes, Ordering::AcqRel);
                Ok(Reservation { inner: Arc::clone(inner), bytes })
            }
            Err(used_bytes) => Err(Error::OverBudget {
                requested_bytes: bytes,
                used_bytes,
                limit_bytes: inner.limit,
            }),
        }
    }

    /// Returns the limit in bytes.
    pub fn limit_bytes(&self) -> usize {
        self.inner.limit
    }

    /// Returns the number of bytes that are currently reserved.
    pub fn used_bytes(&self) -> usize {
        self.inner.used.load(Ordering::Acquire)
    }

    /// Returns the most bytes that were ever reserved at the same time.
    pub fn high_water_bytes(&self) -> usize {
        self.inner.high_water.load(Ordering::Acquire)
    }
}

/// Bytes reserved from a [`Budget`]. Dropping the reservation releases the bytes.
#[derive(Debug)]
pub struct Reservation {
    inner: Arc<BudgetInner>,
    bytes: usize,
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.inner.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_stop_at_the_limit_and_are_released_on_drop() {
        let budget = Budget::new(100);
        let a = budget.reserve(60).unwrap();
        assert!(matches!(budget.reserve(41), Err(Error::OverBudget { used_bytes: 60, .. })));
        assert!(budget.reserve(usize::MAX).is_err());
        drop(a);
        let _b = budget.reserve(100).unwrap();
        assert_eq!((budget.used_bytes(), budget.high_water_bytes()), (100, 100));
    }
}
