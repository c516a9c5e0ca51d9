// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of `HostPool` through its public API.

use proptest::prelude::*;
use ts_pool::{BLOCK_ALIGN, Budget, Error, ErrorKind, HostPool};

fn pool(blocks: usize) -> HostPool {
    HostPool::new(&Budget::new(blocks * BLOCK_ALIGN), blocks * BLOCK_ALIGN)
        .expect("the system maps a small pool")
}

#[test]
fn buffers_are_aligned_disjoint_and_freed() {
    let pool = pool(8);
    let mut a = pool.allocate(3 * BLOCK_ALIGN).unwrap();
    let mut b = pool.allocate(5 * BLOCK_ALIGN).unwrap();
    assert!(
        a.as_ptr().addr().is_multiple_of(BLOCK_ALIGN)
            && b.as_ptr().addr().is_multiple_of(BLOCK_ALIGN)
    );
    a.fill(1);
    b.fill(2);
    assert!(a.iter().all(|&x| x == 1) && b.iter().all(|&x| x == 2));
    assert_eq!(pool.allocate(1).unwrap_err().kind(), ErrorKind::Full);
    drop((a, b));
    let stats = pool.stats();
    assert_eq!((stats.in_use_bytes, stats.high_water_bytes), (0, 8 * BLOCK_ALIGN));
    assert_eq!(stats.largest_free_bytes, 8 * BLOCK_ALIGN);
}

#[test]
fn a_shared_buffer_outlives_its_pool_handle() {
    let budget = Budget::new(1 << 20);
    let pool = HostPool::new(&budget, 1 << 20).unwrap();
    let mut buffer = pool.allocate(100).unwrap();
    buffer.fill(7);
    let shared = buffer.freeze();
    drop(pool);
    let clone = shared.clone();
    drop(shared);
    std::thread::spawn(move || assert!(clone.iter().all(|&x| x == 7))).join().unwrap();
    assert_eq!(budget.used_bytes(), 0);
}

#[test]
fn only_adjacent_parts_of_one_block_join() {
    let pool = pool(4);
    let mut a = pool.allocate(BLOCK_ALIGN).unwrap();
    let b = pool.allocate(BLOCK_ALIGN).unwrap();
    let b = a.unsplit(b).expect_err("`b` is another block");
    drop(b);
    let mut middle = a.split_off(10);
    let end = middle.split_off(10);
    let end = a.unsplit(end).expect_err("`end` is not adjacent");
    a.unsplit(middle).unwrap();
    a.unsplit(end).unwrap();
    assert_eq!(a.len(), BLOCK_ALIGN);
}

#[test]
fn a_request_that_can_never_fit_is_a_distinct_error() {
    let pool = pool(2);
    assert!(matches!(pool.allocate(3 * BLOCK_ALIGN), Err(Error::NeverFits { .. })));
    let over = HostPool::new(&Budget::new(BLOCK_ALIGN), 2 * BLOCK_ALIGN).unwrap_err();
    assert!(matches!(over, Error::OverBudget { .. }), "{over}");
}

proptest! {
    #[test]
    fn parts_of_a_block_never_overlap(cuts in prop::collection::vec(0usize..1000, 1..8)) {
        let pool = pool(1);
        let mut head = pool.allocate(1000).unwrap();
        let mut parts = Vec::new();
        let mut sorted = cuts;
        sorted.sort_unstable();
        for &cut in sorted.iter().rev() {
            let at = cut.min(head.len());
            parts.push(head.split_off(at));
        }
        parts.push(head);
        for (i, part) in parts.iter_mut().enumerate() {
            part.fill(i as u8);
        }
        for (i, part) in parts.iter().enumerate() {
            prop_assert!(part.iter().all(|&x| x == i as u8));
        }
        prop_assert_eq!(parts.iter().map(|p| p.len()).sum::<usize>(), 1000);
    }
}

/// Memory that was returned to the system reads as zeros when it is allocated again.
#[test]
#[cfg(target_os = "linux")]
fn a_retired_pool_returns_memory_to_the_system() {
    let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
    let filled = |len: usize| {
        let mut buffer = pool.allocate(len).unwrap();
        buffer.fill(7);
        buffer
    };
    let (kept, dropped, early) = (filled(100_000), filled(200_000), filled(300_000));
    drop(early);
    pool.retire();
    assert!(
        pool.allocate(300_000).unwrap().iter().all(|&byte| byte == 0),
        "`retire` returns free memory"
    );
    drop(dropped);
    assert!(
        pool.allocate(200_000).unwrap().iter().all(|&byte| byte == 0),
        "later drops return their memory"
    );
    assert!(kept.iter().all(|&byte| byte == 7), "live buffers keep their contents");
}
