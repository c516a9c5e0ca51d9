// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes a batch of requests from arbitrary bytes. If accepted, the requests must round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_exec::{Request, Requests};

fuzz_target!(|batch: &[u8]| {
    let Ok(requests) = Requests::new(batch, 1).collect::<Result<Vec<Request>, _>>() else { return };
    let mut encoded = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut encoded));
    // The input may encode numbers in more bytes than necessary.
    assert!(encoded.len() <= batch.len());
    let decoded = Requests::new(&encoded, 1)
        .collect::<Result<Vec<Request>, _>>()
        .expect("encoded requests are valid");
    // NaNs are not equal to themselves, so compare debug output.
    assert_eq!(format!("{decoded:?}"), format!("{requests:?}"));
});
