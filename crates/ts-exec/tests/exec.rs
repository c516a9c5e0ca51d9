// SPDX-License-Identifier: MIT OR Apache-2.0
//! SessionServer: what is asked is done, once and in order, whatever becomes of links and of operators.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;
use ts_exec::{
    Answer, Call, Client, ClientOptions, EXEC, HostExecutor, OpFailureKind, Output, Request,
    ScalarType, SessionServer, StorageView, TensorRef, UploadSink, Value, WaitError,
};
use ts_remote::{Acceptor, Address, ConnectionOptions, Error, Link, Listener};

const F32: ScalarType = ScalarType(6);
const PATIENT: Duration = Duration::from_secs(20);

/// A machine, until it is dropped.
struct Machine {
    address: Address,
    sessions: Arc<SessionServer<HostExecutor>>,
    stop: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Machine {
    fn start() -> Self {
        let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
        let listener =
            Listener::bind(&"127.0.0.1:0".parse().unwrap(), options.idle_timeout).unwrap();
        let address = listener.address().clone();
        let sessions = Arc::new(SessionServer::new(Duration::from_secs(20)));
        let stop = Arc::new(AtomicBool::new(false));
        let (all, stopped) = (sessions.clone(), stop.clone());
        let accepting = thread::spawn(move || {
            let (mut lobby, mut serving) =
                (Acceptor::<UploadSink<Vec<u8>>>::new(options), Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let met =
                    lobby.accept_within(&listener, Duration::from_millis(20), |_, _| {}).unwrap();
                let Some(link) = met else { continue };
                let (all, stopped) = (all.clone(), stopped.clone());
                serving.push(thread::spawn(move || all.serve(link, HostExecutor::new, &stopped)));
            }
            serving.into_iter().for_each(|one| drop(one.join().unwrap()));
        });
        Self { address, sessions, stop, accepting: Some(accepting) }
    }

    fn client(&self) -> Client<Vec<u8>> {
        client_of(&self.address)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.accepting.take().unwrap().join().unwrap();
    }
}

fn client_of(address: &Address) -> Client<Vec<u8>> {
    static NUMBER: AtomicUsize = AtomicUsize::new(1);
    let address = address.clone();
    let dial = move || {
        let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
        Link::connect(&address, options)
    };
    let options = ClientOptions { dial: Box::new(dial), retry: PATIENT, returns: true };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed) as u128;
    Client::connect(options, number.to_le_bytes()).unwrap()
}

fn tensor(storage: u64, sizes: &[u64]) -> TensorRef {
    TensorRef { storage, view: StorageView::contiguous(F32, sizes.to_vec()) }
}

fn bytes_of(tensor: &TensorRef) -> u64 {
    tensor.view.elements().unwrap() * 4
}

fn new(tensor: &TensorRef) -> Output {
    Output::New { tensor: tensor.clone(), bytes: bytes_of(tensor) }
}

fn create(client: &Client<Vec<u8>>, tensor: &TensorRef, value: f64) {
    let request = Request::Create { storage: tensor.storage, bytes: bytes_of(tensor), device: 0 };
    client.ask(&request).unwrap();
    call(client, "aten::fill_.Scalar", &[tensor], vec![Value::Float(value)], Output::Known);
}

fn call(
    client: &Client<Vec<u8>>,
    op: &str,
    tensors: &[&TensorRef],
    rest: Vec<Value>,
    output: Output,
) -> u64 {
    let args = tensors.iter().map(|&tensor| Value::Tensor(tensor.clone())).chain(rest).collect();
    let op = client.op(op).unwrap();
    let call = Call { op, args, kwargs: Vec::new(), outputs: vec![output], reply: None };
    client.ask(&Request::Call(call)).unwrap()
}

fn read(client: &Client<Vec<u8>>, tensor: &TensorRef) -> Result<Vec<f32>, WaitError> {
    let reply = client.read(tensor.clone(), vec![0; bytes_of(tensor) as usize])?;
    match client.wait(reply, PATIENT)?.expect("it comes in time") {
        Answer::Memory(bytes) => Ok(floats(&bytes)),
        other => panic!("{other:?}"),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn sync(client: &Client<Vec<u8>>) -> Result<(), WaitError> {
    let reply = client.reply();
    client.ask(&Request::Sync { reply })?;
    client.wait(reply, PATIENT)?.expect("it comes in time");
    Ok(())
}

#[test]
fn operators_run_elsewhere_and_values_come_back() {
    let machine = Machine::start();
    let client = machine.client();
    let (ones, sum, product) = (tensor(1, &[2, 3]), tensor(2, &[2, 3]), tensor(3, &[2, 2]));
    create(&client, &ones, 1.0);
    call(&client, "aten::add.Tensor", &[&ones, &ones], vec![], new(&sum));
    let transposed = TensorRef {
        storage: 1,
        view: StorageView { dtype: F32, sizes: vec![3, 2], strides: vec![1, 3], offset: 0 },
    };
    call(&client, "aten::mm", &[&sum, &transposed], vec![], new(&product));
    assert_eq!(read(&client, &product).unwrap(), [6.0; 4]);
    // A view is a matter of the client's; what is written to its storage is seen by it.
    let row = TensorRef {
        storage: 2,
        view: StorageView { offset: 3, ..StorageView::contiguous(F32, vec![3]) },
    };
    call(&client, "aten::fill_.Scalar", &[&row], vec![Value::Int(5)], Output::Known);
    assert_eq!(read(&client, &sum).unwrap(), [2.0, 2.0, 2.0, 5.0, 5.0, 5.0]);
    assert_eq!(client.stats().waits, 2);
    client.close().unwrap();
}

#[test]
fn what_was_never_written_is_zero_and_what_was_freed_is_gone() {
    let machine = Machine::start();
    let client = machine.client();
    let empty = tensor(1, &[4]);
    client.ask(&Request::Create { storage: 1, bytes: 16, device: 0 }).unwrap();
    assert_eq!(read(&client, &empty).unwrap(), [0.0; 4]);
    client.free(1);
    let WaitError::Failed { failure, .. } = read(&client, &empty).unwrap_err() else { panic!() };
    assert_eq!(failure.kind, OpFailureKind::Stale);
}

#[test]
fn a_failure_is_told_once_at_the_next_wait_and_spoils_what_needs_it_and_nothing_else() {
    let machine = Machine::start();
    let client = machine.client();
    let (a, b, bad, worse, good) =
        (tensor(1, &[2]), tensor(2, &[3]), tensor(3, &[2]), tensor(4, &[2]), tensor(5, &[2]));
    create(&client, &a, 1.0);
    create(&client, &b, 1.0);
    let failed = call(&client, "aten::add.Tensor", &[&a, &b], vec![], new(&bad));
    call(&client, "aten::add.Tensor", &[&bad, &a], vec![], new(&worse));
    call(&client, "aten::add.Tensor", &[&a, &a], vec![], new(&good));
    let WaitError::Failed { request, failure, others } = sync(&client).unwrap_err() else {
        panic!()
    };
    assert_eq!((request, failure.kind, others), (failed, OpFailureKind::Raised, 0), "{failure}");
    assert!(failure.message.contains("[2] and [3]"), "{failure}");
    sync(&client).unwrap();
    assert_eq!(read(&client, &good).unwrap(), [2.0, 2.0]);
    // Who asks for what is not there is told why.
    let WaitError::Failed { request, .. } = read(&client, &worse).unwrap_err() else { panic!() };
    assert_eq!(request, failed);
    // An operator that is not known fails where it is called.
    let missing = call(&client, "aten::no_such_thing", &[&a], vec![], new(&tensor(6, &[2])));
    let WaitError::Failed { request, failure, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!((request, failure.kind), (missing, OpFailureKind::Refused));
    assert_eq!(read(&client, &a).unwrap(), [1.0, 1.0]);
}

#[test]
fn long_tensors_come_and_go() {
    let machine = Machine::start();
    let client = machine.client();
    let long = tensor(1, &[5 << 20]);
    let bytes: Vec<u8> = (0..5u32 << 20).flat_map(|at| (at as f32).to_le_bytes()).collect();
    client.ask(&Request::Create { storage: 1, bytes: bytes_of(&long), device: 0 }).unwrap();
    client.write(1, 0, bytes.clone().into()).unwrap();
    // Behind it, and before it is read.
    let first = tensor(1, &[1]);
    call(&client, "aten::fill_.Scalar", &[&first], vec![Value::Int(-1)], Output::Known);
    assert!(client.delivered_within(PATIENT).unwrap());
    let mut expected = floats(&bytes);
    expected[0] = -1.0;
    assert_eq!(read(&client, &long).unwrap(), expected);
    // Bytes for what is not there, or too short, are of no use to anybody, and harm nobody.
    client.write(9, 0, vec![0; 100_000].into()).unwrap();
    let WaitError::Failed { failure, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!(failure.kind, OpFailureKind::Stale);
    client.write(1, bytes_of(&long) - 4, vec![0; 100_000].into()).unwrap();
    assert!(sync(&client).is_err());
    sync(&client).unwrap();
}

#[test]
fn sixteen_threads_share_a_session() {
    let machine = Machine::start();
    let client = machine.client();
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
fn requests_of_any_length_arrive() {
    let machine = Machine::start();
    let client = machine.client();
    let one = tensor(1, &[1]);
    create(&client, &one, 1.0);
    // An argument that is longer than a message may be.
    let list = Value::List(vec![Value::Int(7); 300_000]);
    let failed = call(&client, "aten::add.Tensor", &[&one], vec![list], new(&tensor(2, &[1])));
    let WaitError::Failed { request, .. } = sync(&client).unwrap_err() else { panic!() };
    assert_eq!(request, failed);
    assert_eq!(read(&client, &one).unwrap(), [1.0]);
}

/// Carries bytes between a client and a machine, and cuts each connection after as many as it is
/// told.
struct Cutter {
    address: Address,
    cuts: Arc<AtomicUsize>,
}

impl Cutter {
    fn start(machine: &Address, after: Vec<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let (to, cuts) = (machine.to_string(), Arc::new(AtomicUsize::new(0)));
        let told = cuts.clone();
        thread::spawn(move || {
            let mut after = after.into_iter();
            while let Ok((near, _)) = listener.accept() {
                let Ok(far) = TcpStream::connect(&to) else { return };
                let left = Arc::new(Mutex::new(after.next()));
                for (mut from, mut to) in
                    [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)]
                {
                    let (left, cuts) = (left.clone(), told.clone());
                    thread::spawn(move || {
                        let mut bytes = vec![0; 4096];
                        while let Ok(len @ 1..) = from.read(&mut bytes) {
                            let mut left = left.lock().unwrap();
                            let len = len.min(left.unwrap_or(usize::MAX));
                            let sent = to.write_all(&bytes[..len]);
                            if let Some(left) = &mut *left {
                                *left -= len;
                                if *left == 0 {
                                    cuts.fetch_add(1, Ordering::Relaxed);
                                    break;
                                }
                            }
                            if sent.is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        Self { address, cuts }
    }
}

#[test]
fn a_session_goes_on_over_links_that_are_lost_and_everything_is_done_once() {
    let machine = Machine::start();
    for seed in 1..12usize {
        let after = (0..6).map(|at| 500 + (seed * 7919 + at * 104_729) % 40_000).collect();
        let cutter = Cutter::start(&machine.address, after);
        let client = client_of(&cutter.address);
        let sum = tensor(1, &[2000]);
        let one = tensor(2, &[2000]);
        create(&client, &sum, 0.0);
        create(&client, &one, 1.0);
        for step in 1..=120u64 {
            // Done twice, or not at all, it would show.
            let next = tensor(step + 2, &[2000]);
            call(&client, "aten::add.Tensor", &[&sum, &one], vec![], new(&next));
            call(&client, "aten::copy_", &[&sum, &next], vec![], Output::Known);
            client.free(next.storage);
            if step % 10 == 0 {
                assert_eq!(read(&client, &sum).unwrap(), [step as f32; 2000], "seed {seed}");
            }
            if step % 40 == 0 {
                let ones: Vec<u8> =
                    [1.0f32; 2000].iter().flat_map(|one| one.to_le_bytes()).collect();
                client.write(2, 0, [&ones[..], &[0; 0]].concat().into()).unwrap();
                client.write(1, 0, floats_of(step as f32, 2000).into()).unwrap();
            }
        }
        let cuts = cutter.cuts.load(Ordering::Relaxed);
        assert!(
            cuts > 2 && client.stats().reconnects >= 2,
            "seed {seed}: {cuts} cuts, {:?}",
            client.stats()
        );
        client.close().unwrap();
    }
    let ended = (0..500).any(|_| {
        thread::sleep(Duration::from_millis(10));
        machine.sessions.count() == 0
    });
    assert!(ended, "{} sessions are left", machine.sessions.count());
}

#[test]
fn an_answer_that_is_cut_off_comes_again() {
    const COUNT: u64 = 300_000;
    let machine = Machine::start();
    for seed in 0..8usize {
        let cutter = Cutter::start(
            &machine.address,
            vec![3_000 + seed * 150_000, 1_000_000 - seed * 90_000],
        );
        let client = client_of(&cutter.address);
        let large = tensor(1, &[COUNT]);
        create(&client, &large, 3.0);
        for _ in 0..3 {
            assert_eq!(read(&client, &large).unwrap(), vec![3.0; COUNT as usize], "seed {seed}");
        }
        assert_eq!(client.stats().reconnects, 2, "seed {seed}");
        client.close().unwrap();
    }
}

#[test]
fn a_machine_tells_what_storages_it_has() {
    let machine = Machine::start();
    let client = machine.client();
    let [written, never, bad] = [1, 2, 3].map(|storage| tensor(storage, &[4]));
    create(&client, &written, 1.0);
    for tensor in [&never, &bad] {
        client.ask(&Request::Create { storage: tensor.storage, bytes: 16, device: 0 }).unwrap();
    }
    call(&client, "aten::copy_", &[&bad, &tensor(9, &[4])], vec![], Output::Known);
    assert!(matches!(sync(&client), Err(WaitError::Failed { .. })));
    let reply = client.reply();
    client.ask(&Request::List { reply }).unwrap();
    let Ok(Some(Answer::Values(values))) = client.wait(reply, PATIENT) else { panic!("no answer") };
    let mut told: Vec<_> =
        values.as_chunks::<4>().0.iter().map(|told| format!("{told:?}")).collect();
    told.sort();
    let told: Vec<_> = told.iter().map(|told| told.replace("Int(", "").replace(')', "")).collect();
    assert_eq!(told, ["[1, 16, 0, 1]", "[2, 16, 0, 0]", "[3, 16, 0, 2]"]);
}

fn floats_of(value: f32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| value.to_le_bytes()).collect()
}

#[test]
fn a_machine_that_is_gone_ends_the_session_and_nobody_waits_for_ever() {
    let machine = Machine::start();
    let address = machine.address.clone();
    let dial = move || Link::connect(&address, ConnectionOptions::default());
    let options =
        ClientOptions { dial: Box::new(dial), retry: Duration::from_millis(300), returns: true };
    let client: Client<Vec<u8>> = Client::connect(options, [200; 16]).unwrap();
    create(&client, &tensor(1, &[2]), 1.0);
    sync(&client).unwrap();
    drop(machine);
    assert!(matches!(sync(&client), Err(WaitError::Lost(_))));
    assert!(client.ask(&Request::Free { storage: 1 }).is_err(), "it is over");
    client.free(1);
}

#[test]
fn a_session_that_there_is_no_more_is_not_begun_again() {
    let machine = Machine::start();
    let cutter = Cutter::start(&machine.address, vec![3000, 3000, 3000, 3000]);
    let client = client_of(&cutter.address);
    let one = tensor(1, &[16]);
    create(&client, &one, 1.0);
    sync(&client).unwrap();
    drop(machine);
    // Another machine at the same place would have none of its tensors; here there is nobody.
    let mut ended = Ok(());
    let options = || ClientOptions {
        dial: Box::new(|| Err(Error::Misuse("no".into()))),
        retry: PATIENT,
        returns: true,
    };
    assert!(Client::<Vec<u8>>::connect(options(), [3; 16]).is_err());
    for _ in 0..100 {
        ended = ended.and_then(|()| sync(&client));
    }
    assert!(matches!(ended, Err(WaitError::Lost(_))), "{ended:?}");
}

/// One that connects, before either end has greeted.
fn accept(listener: &Listener) -> Result<Link<Vec<u8>>, Error> {
    let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
    let mut lobby = Acceptor::<Vec<u8>>::new(options);
    loop {
        if let Some(link) = lobby.accept_within(listener, PATIENT, |_, _| {})? {
            return Ok(link);
        }
    }
}

/// Greets as a machine does, and then says this.
fn greet(listener: &Listener, messages: &[Vec<u8>]) -> Result<Link<Vec<u8>>, Error> {
    let mut link = accept(listener)?;
    let stream = link.connection().open_stream()?;
    let mut hello = vec![2];
    hello.extend([7; 16]);
    hello.push(0);
    link.send_message(stream, hello.into())?;
    for message in messages {
        link.send_message(stream, message.clone().into())?;
    }
    Ok(link)
}

fn say(listener: &Listener, messages: &[Vec<u8>]) -> Result<(), Error> {
    greet(listener, messages)?.close("that was all")
}

#[test]
fn an_end_before_the_greeting_is_that_of_a_link_and_not_of_the_session() {
    let machine = Machine::start();
    let cutter = Cutter::start(&machine.address, vec![2000]);
    let mute = Listener::bind(&"127.0.0.1:0".parse().unwrap(), PATIENT).unwrap();
    let (first, second, third) =
        (cutter.address.clone(), mute.address().clone(), machine.address.clone());
    // It hears who is there, and ends in good order without a word.
    let ended = thread::spawn(move || accept(&mute).map(drop));
    let dials = Arc::new(AtomicUsize::new(0));
    let dialled = dials.clone();
    let dial = move || {
        let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
        let to = [&first, &second, &third][dialled.fetch_add(1, Ordering::Relaxed).min(2)];
        Link::connect(to, options)
    };
    let options = ClientOptions { dial: Box::new(dial), retry: PATIENT, returns: true };
    let client = Client::<Vec<u8>>::connect(options, [91; 16]).unwrap();
    let one = tensor(1, &[16]);
    create(&client, &one, 1.0);
    for _ in 0..100 {
        sync(&client).unwrap();
    }
    assert_eq!(read(&client, &one).unwrap(), [1.0; 16]);
    assert!(dials.load(Ordering::Relaxed) >= 3, "the second link ended before it greeted");
    ended.join().unwrap().unwrap();
    client.close().unwrap();
}

#[test]
fn an_answer_that_is_lost_ends_the_session_when_the_next_one_comes() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap(), PATIENT).unwrap();
    let address = listener.address().clone();
    // Answers to the second question and none to the first: what the client asks when it begins to
    // doubt.
    let machine = thread::spawn(move || {
        let mut link = greet(&listener, &[vec![0, 1, 2, 0]])?;
        while link.next_event().is_ok() {}
        Ok::<_, Error>(())
    });
    let dial = move || {
        let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
        Link::connect(&address, options)
    };
    let options = ClientOptions { dial: Box::new(dial), retry: PATIENT, returns: true };
    let client = Client::<Vec<u8>>::connect(options, [92; 16]).unwrap();
    let reply = client.read(tensor(1, &[2]), vec![0; 8]).unwrap();
    let lost = client.wait(reply, PATIENT);
    assert!(matches!(&lost, Err(WaitError::Lost(Error::Protocol { .. }))), "{lost:?}");
    machine.join().unwrap().unwrap();
}

#[test]
fn few_sessions_are_kept_without_a_link() {
    let machine = Machine::start();
    for number in 0..100u128 {
        let address = machine.address.clone();
        let dialled = AtomicBool::new(false);
        let dial = move || {
            if dialled.swap(true, Ordering::Relaxed) {
                return Err(Error::Misuse("once is enough".into()));
            }
            let options =
                ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
            // What is sent behind the greeting is cut off.
            Link::connect(&Cutter::start(&address, vec![1500]).address, options)
        };
        let options = ClientOptions { dial: Box::new(dial), retry: Duration::ZERO, returns: true };
        let client = Client::<Vec<u8>>::connect(options, (number + 5000).to_le_bytes()).unwrap();
        while sync(&client).is_ok() {}
    }
    let end = std::time::Instant::now() + PATIENT;
    while machine.sessions.count() > 64 && std::time::Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    assert!((2..=64).contains(&machine.sessions.count()), "{} sessions", machine.sessions.count());
}

#[test]
fn whoever_never_listens_again_is_not_waited_for() {
    let machine = Machine::start();
    let address = machine.address.clone();
    let dial = move || {
        let options = ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
        Link::connect(&address, options)
    };
    let options =
        ClientOptions { dial: Box::new(dial), retry: Duration::from_secs(600), returns: false };
    let client = Client::<Vec<u8>>::connect(options, [93; 16]).unwrap();
    sync(&client).unwrap();
    drop(machine);
    assert!(matches!(sync(&client), Err(WaitError::Lost(_))));
    assert!(client.is_over());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn a_machine_that_says_anything_is_an_error_and_nothing_worse(
        said in prop::collection::vec(
            (0u8..4, 0u8..7, prop::collection::vec(any::<u8>(), 0..40)),
            0..6,
        ),
    ) {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap(), PATIENT).unwrap();
        let address = listener.address().clone();
        // What they are, in the channel and among replies, is mostly something that there is.
        let messages: Vec<_> = said
            .into_iter()
            .map(|(kind, reply, rest)| [vec![kind, reply], rest].concat())
            .collect();
        let machine = thread::spawn(move || say(&listener, &messages));
        let dial = move || {
            let options =
                ConnectionOptions { service: EXEC.into(), ..ConnectionOptions::default() };
            Link::connect(&address, options)
        };
        let client = Client::<Vec<u8>>::connect(
            ClientOptions { dial: Box::new(dial), retry: Duration::ZERO, returns: true },
            [7; 16],
        );
        if let Ok(client) = client {
            let (sum, forgotten) = (client.read(tensor(1, &[2]), vec![0; 8]), client.reply());
            client.forget(forgotten);
            if let Ok(reply) = sum {
                prop_assert!(matches!(client.wait(reply, PATIENT), Err(_) | Ok(Some(_))));
            }
        }
        let _ = machine.join().unwrap();
    }
}
