// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any bytes decode to a batch of requests or to an error, and requests survive encoding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_exec::{Request, Requests};

fuzz_target!(|batch: &[u8]| {
    let Ok(requests) = Requests::new(batch, 1).collect::<Result<Vec<Request>, _>>() else { return };
    let mut again = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut again));
    // The input may have varints with superfluous bytes.
    assert!(again.len() <= batch.len());
    let read = Requests::new(&again, 1)
        .collect::<Result<Vec<Request>, _>>()
        .expect("an encoded batch decodes");
    // Compared as text, because a NaN does not equal itself.
    assert_eq!(format!("{read:?}"), format!("{requests:?}"));
});
