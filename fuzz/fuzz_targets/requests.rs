// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes arbitrary bytes: the result is a batch of requests or an error. Also encodes the
//! requests, which must round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_exec::{Request, Requests};

fuzz_target!(|batch: &[u8]| {
    let Ok(requests) = Requests::new(batch, 1).collect::<Result<Vec<Request>, _>>() else { return };
    let mut again = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut again));
    // The encoded batch can be shorter, because varints in the input may have superfluous bytes.
    assert!(again.len() <= batch.len());
    let read = Requests::new(&again, 1)
        .collect::<Result<Vec<Request>, _>>()
        .expect("an encoded batch decodes");
    // The requests are compared as text, because a NaN does not equal itself.
    assert_eq!(format!("{read:?}"), format!("{requests:?}"));
});
