// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of requests, replies and failures over links that are not lost.

use super::*;
use ts_exec::OpFailureKind;

#[test]
fn operators_run_on_the_server_and_values_are_read_back() {
    let server = TestServer::start();
    let client = server.client();
    let (ones, sum, product) = (tensor(1, &[2, 3]), tensor(2, &[2, 3]), tensor(3, &[2, 2]));
    create(&client, &ones, 1.0);
    call(&client, "aten::add.Tensor", &[&ones, &ones], vec![], new(&sum));
    let transposed = TensorRef {
        storage: 1,
        view: StorageView {
            sizes: vec![3, 2],
            strides: vec![1, 3],
            ..StorageView::contiguous(ScalarType::FLOAT32, vec![])
        },
    };
    call(&client, "aten::mm", &[&sum, &transposed], vec![], new(&product));
    assert_eq!(read(&client, &product).unwrap(), [6.0; 4]);
    // A write to a view is visible through other views of the storage.
    let row = TensorRef {
        storage: 2,
        view: StorageView { offset: 3, ..StorageView::contiguous(ScalarType::FLOAT32, vec![3]) },
    };
    call(&client, "aten::fill_.Scalar", &[&row], vec![Value::Int(5)], Output::Known);
    assert_eq!(read(&client, &sum).unwrap(), [2.0, 2.0, 2.0, 5.0, 5.0, 5.0]);
    assert_eq!(client.stats().waits, 2);
    client.close().unwrap();
}

#[test]
fn unwritten_storages_are_zero_and_freed_ones_are_stale() {
    let server = TestServer::start();
    let client = server.client();
    let unwritten = tensor(1, &[4]);
    client.send(&Request::Create { storage: 1, bytes: 16, device: 0 }).unwrap();
    assert_eq!(read(&client, &unwritten).unwrap(), [0.0; 4]);
    client.free(1);
    let WaitError::Failed { failure, .. } = read(&client, &unwritten).unwrap_err() else {
        panic!()
    };
    assert_eq!(failure.kind, OpFailureKind::Stale);
}

#[test]
fn a_failure_is_reported_once_and_poisons_only_dependents() {
    let server = TestServer::start();
    let client = server.client();
    let (a, b, bad, dependent, good) =
        (tensor(1, &[2]), tensor(2, &[3]), tensor(3, &[2]), tensor(4, &[2]), tensor(5, &[2]));
    create(&client, &a, 1.0);
    create(&client, &b, 1.0);
    let failed = call(&client, "aten::add.Tensor", &[&a, &b], vec![], new(&bad));
    call(&client, "aten::add.Tensor", &[&bad, &a], vec![], new(&dependent));
    call(&client, "aten::add.Tensor", &[&a, &a], vec![], new(&good));
    let WaitError::Failed { request, failure, others } = sync(&client).unwrap_err() else {
        panic!()
    };
    assert_eq!((request, failure.kind, others), (failed, OpFailureKind::Operator, 0), "{failure}");
    assert!(failure.message.contains("[2] and [3]"), "{failure}");
    sync(&client).unwrap();
    assert_eq!(read(&client, &good).unwrap(), [2.0, 2.0]);
    // Reading a poisoned tensor fails with the cause.
    let WaitError::Failed { request, .. } = read(&client, &dependent).unwrap_err() else {
        panic!()
    };
    assert_eq!(request, failed);
    // An unknown operator fails when it is called.
    let missing = call(&client, "aten::no_such_thing", &[&a], vec![], new(&tensor(6, &[2])));
    let WaitError::Failed { request, failure, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!((request, failure.kind), (missing, OpFailureKind::Refused));
    assert_eq!(read(&client, &a).unwrap(), [1.0, 1.0]);
}

#[test]
fn large_tensors_are_uploaded_and_downloaded() {
    let server = TestServer::start();
    let client = server.client();
    let large = tensor(1, &[5 << 20]);
    let bytes: Vec<u8> = (0..5u32 << 20).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let create = Request::Create { storage: 1, bytes: bytes_of(&large), device: 0 };
    client.send(&create).unwrap();
    client.write(1, 0, bytes.clone().into()).unwrap();
    // This request runs after the upload and before the download.
    let first = tensor(1, &[1]);
    call(&client, "aten::fill_.Scalar", &[&first], vec![Value::Int(-1)], Output::Known);
    assert!(client.delivered_within(TIMEOUT).unwrap());
    let mut expected = floats(&bytes);
    expected[0] = -1.0;
    assert_eq!(read(&client, &large).unwrap(), expected);
    // An upload to a storage that does not exist or is too short fails, and later requests run.
    client.write(9, 0, vec![0; 100_000].into()).unwrap();
    let WaitError::Failed { failure, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!(failure.kind, OpFailureKind::Stale);
    client.write(1, bytes_of(&large) - 4, vec![0; 100_000].into()).unwrap();
    assert!(sync(&client).is_err());
    sync(&client).unwrap();
}

#[test]
fn a_tensor_larger_than_the_limit_of_unacknowledged_bytes_is_downloaded() {
    let server = TestServer::start();
    let client = server.client();
    let large = tensor(1, &[65 << 20]);
    let bytes = bytes_of(&large);
    client.send(&Request::Create { storage: 1, bytes, device: 0 }).unwrap();
    for _ in 0..2 {
        let reply = client.read(large.clone(), vec![1; bytes as usize]).unwrap();
        let Some(Answer::Memory(read)) = client.wait(reply, TIMEOUT).unwrap() else { panic!() };
        assert!(read.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn sixteen_threads_share_a_session() {
    let server = TestServer::start();
    let client = server.client();
    thread::scope(|scope| {
        for number in 0..16u64 {
            let client = &client;
            scope.spawn(move || {
                let first = number * 1000 + 1;
                create(client, &tensor(first, &[8]), number as f64);
                for step in 1..200 {
                    let (before, after) =
                        (tensor(first + step - 1, &[8]), tensor(first + step, &[8]));
                    call(
                        client,
                        "aten::add.Tensor",
                        &[&before, &tensor(first, &[8])],
                        vec![],
                        new(&after),
                    );
                    if step > 1 {
                        client.free(before.storage);
                    }
                    if step % 50 == 0 {
                        let expected = (step + 1) as f32 * number as f32;
                        assert_eq!(read(client, &after).unwrap(), [expected; 8]);
                    }
                }
            });
        }
    });
}

#[test]
fn requests_longer_than_a_message_arrive() {
    let server = TestServer::start();
    let client = server.client();
    let one = tensor(1, &[1]);
    create(&client, &one, 1.0);
    let list = Value::List(vec![Value::Int(7); 300_000]);
    let failed = call(&client, "aten::add.Tensor", &[&one], vec![list], new(&tensor(2, &[1])));
    let WaitError::Failed { request, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!(request, failed);
    assert_eq!(read(&client, &one).unwrap(), [1.0]);
}

#[test]
fn storages_are_listed_with_their_state() {
    let server = TestServer::start();
    let client = server.client();
    let [written, unwritten, poisoned] = [1, 2, 3].map(|storage| tensor(storage, &[4]));
    create(&client, &written, 1.0);
    for tensor in [&unwritten, &poisoned] {
        let create = Request::Create { storage: tensor.storage, bytes: 16, device: 0 };
        client.send(&create).unwrap();
    }
    call(&client, "aten::copy_", &[&poisoned, &tensor(9, &[4])], vec![], Output::Known);
    assert!(matches!(sync(&client), Err(WaitError::Failed { .. })));
    let reply = client.new_reply();
    client.send(&Request::List { reply }).unwrap();
    let Ok(Some(Answer::Values(values))) = client.wait(reply, TIMEOUT) else { panic!("no answer") };
    let mut storages = values.as_chunks::<4>().0.to_vec();
    storages.sort_by_key(|storage| format!("{storage:?}"));
    let expected = [[1, 16, 0, 1], [2, 16, 0, 0], [3, 16, 0, 2]];
    assert_eq!(storages, expected.map(|storage| storage.map(Value::Int)));
}
