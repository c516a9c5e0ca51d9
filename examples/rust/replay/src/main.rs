// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replays a log of RMM (the RAPIDS Memory Manager) against pools of several sizes, and finds the
//! smallest one that serves all allocations.

use std::error::Error;
use std::fmt::Write;

use ts_pool::ts_streams::CpuDevice;
use ts_pool::{AllocationLog, OrderedOptions, StreamOrderedPool};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let log = AllocationLog::parse(&training_log()?)?;
    let device = CpuDevice::new()?;
    let mut smallest = 0;
    for limit_mib in [12, 8, 4, 2] {
        let options = OrderedOptions::default()
            .with_segment_bytes(limit_mib * MIB)
            .with_limit_bytes(limit_mib * MIB);
        let pool = StreamOrderedPool::new(device.clone(), options);
        let replay = log.replay(&device, &pool)?;
        assert_eq!(replay.allocations + replay.refused, 40);
        if replay.refused == 0 {
            smallest = limit_mib;
        }
    }
    assert_eq!(smallest, 4, "a step uses 3 MiB");
    println!("{} events need a pool of {smallest} MiB", log.events().len());
    Ok(())
}

/// Returns the log of ten steps, which allocate four blocks each: 3 MiB at the same time.
fn training_log() -> Result<String, std::fmt::Error> {
    let mut log = String::from("Thread,Time,Action,Pointer,Size,Stream\n");
    let blocks = [(0xa000, MIB), (0xb000, MIB / 2), (0xc000, MIB / 2), (0xd000, MIB)];
    for step in 0..10 {
        for action in ["allocate", "free"] {
            for (pointer, bytes) in blocks {
                writeln!(log, "1,14:21:{step:02}.000000,{action},{pointer:#x},{bytes},0x2")?;
            }
        }
    }
    Ok(log)
}
