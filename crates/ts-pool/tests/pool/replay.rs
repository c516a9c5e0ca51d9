// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the replay of RMM logs.

use proptest::prelude::*;
use ts_pool::{AllocationLog, Error, OrderedOptions, StreamOrderedAllocator, StreamOrderedPool};
use ts_streams::{Device, SimDevice, SimOptions};

/// Lines in the formats that appear in the documentation of RMM and in reports of its users.
const LOG: &str = "\
Thread,Time,Action,Pointer,Size,Stream
1979932,14:21:19.998533,allocate,0x30a000000,256,0x2
140573312345856,1634567890.123456,allocate,0x7f8a40000000,1024,0x7f8a38001020
1979932,14:21:20.000000,allocate failure,0x0,99999999999,0x2
1980043,14:21:32.661875,free,0x30a000000,256,0x2
140573312345856,1634567890.345678,deallocate,0x7f8a40000000,1024,0x2
2342727,15:47:02.841961,allocate,0x10012400000,1048576,0
2342727,15:47:02.841961,allocate,0x10012500000,8,per-thread default
2342727,15:47:02.841977,free,0xbad,1048576,0
";

#[test]
fn a_log_of_rmm_is_parsed_and_replayed() {
    let log = AllocationLog::parse(LOG).unwrap();
    assert_eq!(log.events().len(), 7);
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(
        device.clone(),
        OrderedOptions::default().with_segment_bytes(1 << 20),
    );
    let replay = log.replay(&device, &pool).unwrap();
    assert_eq!((replay.allocations, replay.frees, replay.refused), (4, 2, 0));
    assert_eq!((replay.unmatched, replay.streams), (1, 4));
    assert_eq!((replay.peak_bytes, replay.capacity_bytes), (1048576 + 8, 2 << 20));
    assert_eq!(pool.stats().in_use_bytes, 0);
    let small = OrderedOptions::default().with_limit_bytes(4096).with_segment_bytes(4096);
    let pool = StreamOrderedPool::new(device.clone(), small);
    assert_eq!(log.replay(&device, &pool).unwrap().refused, 1);
}

#[test]
fn an_invalid_line_is_reported_with_its_number() {
    for (line, reason) in [
        (
            "1,2,allocate,0x1,5",
            "expected the 6 columns Thread,Time,Action,Pointer,Size,Stream, got 5",
        ),
        (
            "1,2,grow,0x1,5,0",
            "unknown action \"grow\": expected allocate, \"allocate failure\", free or deallocate",
        ),
        (
            "1,2,free,0xyz,5,0",
            "invalid pointer \"0xyz\": expected a decimal number, or a hexadecimal number after \
             0x, below 2^64",
        ),
        ("1,2,free,0x1,-5,0", "invalid size \"-5\": expected a decimal 64-bit number of bytes"),
    ] {
        let error = AllocationLog::parse(&format!("{LOG}\n{line}\n")).unwrap_err();
        assert!(
            matches!(error, Error::BadLog { line: 11, .. }) && error.to_string().ends_with(reason),
            "{error}"
        );
    }
}

proptest! {
    #[test]
    fn no_input_makes_the_parser_panic(
        text in "(.{0,40}\n|[0-9],[0-9],(allocate|free),0x[0-9a-f]{1,3},[0-9]{1,6},[0-9]\n){0,30}",
    ) {
        if let Ok(log) = AllocationLog::parse(&text) {
            let device =
                SimDevice::new(SimOptions::default().with_total_bytes(8 << 20));
            let pool = StreamOrderedPool::new(
                device.clone(),
                OrderedOptions::default().with_segment_bytes(1 << 16),
            );
            let replay = log.replay(&device, &pool).unwrap();
            prop_assert_eq!(
                replay.allocations + replay.refused,
                log.events().iter().filter(|e| e.allocates).count()
            );
            device.synchronize().unwrap();
            prop_assert_eq!(pool.stats().in_use_bytes, 0);
        }
    }
}
