// SPDX-License-Identifier: MIT OR Apache-2.0
//! A batch of operators, whatever its bytes: requests, or an error; and what is made of requests is
//! read as they were.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_exec::{Request, Requests};

fuzz_target!(|batch: &[u8]| {
    let Ok(requests) = Requests::new(batch, 1).collect::<Result<Vec<Request>, _>>() else { return };
    let mut again = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut again));
    // Numbers may be written longer than they need be, and those that are not numbers never equal
    // themselves.
    assert!(again.len() <= batch.len());
    let read =
        Requests::new(&again, 1).collect::<Result<Vec<Request>, _>>().expect("it was just written");
    assert_eq!(format!("{read:?}"), format!("{requests:?}"));
});
