// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two pools share a budget. A buffer is filled by two threads, shared, and freed by its last
//! owner.

use std::error::Error;
use std::thread;

use ts_pool::{Budget, ErrorKind, HostPool};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let budget = Budget::new(8 * MIB);
    let pool = HostPool::new(&budget, 6 * MIB)?;
    let _small = HostPool::new(&budget, 2 * MIB)?;
    let error = HostPool::new(&budget, MIB).expect_err("all of the budget is reserved");
    assert_eq!(error.kind(), ErrorKind::NeverFits);

    let mut head = pool.allocate(4 * MIB)?;
    let mut tail = head.split_off(2 * MIB);
    thread::scope(|scope| {
        scope.spawn(|| head.fill(1));
        scope.spawn(|| tail.fill(2));
    });
    head.unsplit(tail).map_err(|_| "the parts are adjacent")?;
    let shared = head.freeze();
    let reader = shared.clone();
    let sum = thread::spawn(move || reader.iter().map(|&byte| u64::from(byte)).sum::<u64>());
    assert_eq!(sum.join().map_err(|_| "the reader panicked")?, 6 * MIB as u64);

    let error = pool.allocate(4 * MIB).expect_err("the buffer is still shared");
    assert_eq!(error.kind(), ErrorKind::Full);
    drop(shared);
    pool.allocate(4 * MIB)?;
    let stats = pool.stats();
    assert_eq!((stats.in_use_bytes, stats.high_water_bytes, stats.failures), (0, 4 * MIB, 1));
    println!("{} of {} bytes reserved, and then: {error}", budget.used_bytes(), 8 * MIB);
    Ok(())
}
