// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models whose layers are streamed by name.

#![allow(clippy::single_range_in_vec_init)] // ranges of rows

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tempfile::TempDir;
use ts_format::Dtype;
use ts_orchestrator::{Bytes, Error, ErrorKind, Model};

const LAYERS: usize = 12;
const HIDDEN: u64 = 64;
const ROWS: u64 = 100;

/// Writes tensors of bytes to a safetensors file. Byte `i` of tensor `n` is `i + 7 * n`.
fn write(path: &Path, tensors: &[(String, Vec<u64>)]) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (n, (name, shape)) in tensors.iter().enumerate() {
        let begin = data.len();
        data.extend(content(n, shape.iter().product()));
        let offsets = [begin, data.len()];
        entries.push(format!(
            r#""{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":{offsets:?}}}"#
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let len = (header.len() as u64).to_le_bytes();
    fs::write(path, [&len[..], header.as_bytes(), &data].concat()).unwrap();
}

fn content(n: usize, len: u64) -> impl Iterator<Item = u8> {
    (0..len).map(move |i| (i as usize + 7 * n) as u8)
}

/// Returns the tensors of a model: an embedding of 6400 bytes and layers of about 8 KiB.
fn tensors() -> Vec<(String, Vec<u64>)> {
    let mut tensors = vec![("embed.weight".to_string(), vec![ROWS, HIDDEN])];
    for layer in 0..LAYERS {
        tensors.push((format!("layers.{layer}.mlp.weight"), vec![2 * HIDDEN, HIDDEN]));
        tensors.push((format!("layers.{layer}.norm"), vec![HIDDEN]));
    }
    tensors
}

fn directory() -> TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(&dir.path().join("model.safetensors"), &tensors());
    dir
}

/// Returns the bytes of a tensor of the model.
fn bytes(name: &str) -> Vec<u8> {
    let tensors = tensors();
    let n = tensors.iter().position(|(known, _)| known == name).unwrap();
    content(n, tensors[n].1.iter().product()).collect()
}

#[test]
fn layers_are_streamed_by_name() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().budget(Bytes::kib(64)).build().unwrap();
    let expected: Vec<_> = (0..LAYERS).map(|layer| format!("layers.{layer}")).collect();
    let units: Vec<_> = model.units().collect();
    assert_eq!(
        (units[0], &units[1..]),
        ("embed", &expected.iter().map(|n| &n[..]).collect::<Vec<_>>()[..])
    );
    for _ in 0..4 {
        let pass = model.pass().unwrap();
        for name in model.units() {
            let unit = pass.unit(name).unwrap();
            assert_eq!(unit.name(), name);
            for (name, tensor) in unit.tensors() {
                assert_eq!(tensor.dtype(), Dtype::U8);
                assert_eq!(tensor.shape().iter().product::<u64>(), tensor.len() as u64);
                assert!(tensor[..] == bytes(name), "{name}");
            }
        }
        let norm = pass.unit("layers.7").unwrap().tensor("norm").unwrap();
        assert!(norm[..] == bytes("layers.7.norm") && norm.shape() == [HIDDEN]);
    }
    let stats = model.engine().stats();
    assert!(stats.in_use_high_water_bytes <= 64 << 10 && stats.passes == 4);
    assert!(stats.units.iter().any(|unit| !unit.resident), "the budget is less than the model");
}

#[test]
fn without_a_budget_everything_stays_in_memory() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().build().unwrap();
    for _ in 0..3 {
        let pass = model.pass().unwrap();
        let tensor = pass.unit("layers.11").unwrap().tensor("layers.11.mlp.weight").unwrap();
        assert!(tensor[..] == bytes("layers.11.mlp.weight"));
    }
    assert_eq!(model.engine().plan().streamed_bytes_per_pass, 0);
}

#[test]
fn tensors_outlive_everything() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().budget(Bytes::kib(64)).build().unwrap();
    let pass = model.pass().unwrap();
    drop(model);
    let tensor = pass.unit("layers.3").unwrap().tensor("norm").unwrap();
    drop(pass);
    assert!(tensor[..] == bytes("layers.3.norm"));
}

#[test]
fn rows_are_read_without_their_unit() {
    let dir = directory();
    let cached = Model::open(&dir).unwrap().budget(Bytes::kib(64)).rows_of("embed.weight");
    let models = [
        Model::open(&dir).unwrap().budget(Bytes::kib(64)).build().unwrap(),
        cached.build().unwrap(),
    ];
    assert_eq!(models.each_ref().map(|m| m.units().len()), [LAYERS + 1, LAYERS]);
    let row =
        |row: u64| bytes("embed.weight")[(row * HIDDEN) as usize..][..HIDDEN as usize].to_vec();
    for model in &models {
        let read = |ranges: &[_]| model.read_ranges("embed.weight", ranges);
        let rows = read(&[7..9, 99..100, 3..3, 0..1]).unwrap();
        assert_eq!(rows.shape(), [4, HIDDEN]);
        assert!(rows[..] == [7, 8, 99, 0].map(row).concat());
        let none = read(&[]).unwrap();
        assert_eq!((none.shape(), none.len()), (&[0, HIDDEN][..], 0));
        assert!(read(&[0..ROWS]).unwrap()[..] == bytes("embed.weight"));
        let error = read(&[0..1, 5..ROWS + 1]).unwrap_err();
        assert!(matches!(error, Error::NoSuchRow { row: ROWS, count: ROWS, .. }), "{error}");
        let norm = model.read_ranges("layers.2.norm", &[3..5]).unwrap();
        assert!(norm[..] == bytes("layers.2.norm")[3..5]);
        assert!(model.engine().stats().units.iter().all(|unit| unit.uses == 0));
    }
}

#[test]
fn the_caller_can_group_tensors() {
    let dir = directory();
    let by_kind = |name: &str| match name.rsplit_once('.') {
        Some((_, "norm")) => "norms".to_string(),
        _ => name.to_string(),
    };
    let builder = Model::open(&dir).unwrap().budget(Bytes::kib(64)).group_by(by_kind);
    let model = builder.build().unwrap();
    assert_eq!(model.unit_of("layers.5.norm"), Some("norms"));
    let pass = model.pass().unwrap();
    let [norms, weight] = pass.units(["norms", "layers.5.mlp.weight"]).unwrap();
    assert_eq!((norms.tensors().len(), weight.tensors().len()), (LAYERS, 1));
    assert!(norms.tensor("layers.5.norm").unwrap()[..] == bytes("layers.5.norm"));
}

#[test]
fn errors_name_what_exists() {
    let dir = directory();
    let open = || Model::open(&dir).unwrap();
    let model = open().budget(Bytes::kib(64)).build().unwrap();
    let pass = model.pass().unwrap();
    let has = |error: Error, expected: &str| {
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.kind(), ErrorKind::Misuse);
    };
    has(
        pass.unit("layer.3").unwrap_err(),
        "no unit `layer.3`: did you mean `layers.3`? there are 13",
    );
    has(pass.unit("layers.3.norm").unwrap_err(), "did you mean `layers.3`?");
    has(pass.unit("x").unwrap_err(), "no unit `x`: there are 13: `embed`, `layers.0`");
    has(pass.units(["embed", "x"]).unwrap_err(), "no unit `x`");
    let unit = pass.unit("layers.3").unwrap();
    has(
        unit.tensor("mlp.wieght").unwrap_err(),
        "layers.3: no tensor `mlp.wieght`: did you mean `mlp.weight`?",
    );
    has(model.read_ranges("embed.wight", &[]).unwrap_err(), "did you mean `embed.weight`?");
    has(open().rows_of("embed").build().unwrap_err(), "no tensor `embed`");
    let error = open().budget(Bytes::kib(1)).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NeverFits);
    let empty = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let error = Model::open(&empty).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotACheckpoint);
    assert!(error.to_string().contains("no checkpoint found"), "{error}");
}

#[test]
fn tensors_without_rows_are_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("model.safetensors");
    write(&path, &[("scalar".into(), vec![]), ("w".into(), vec![2])]);
    let model = Model::open(&path).unwrap().build().unwrap();
    let error = model.read_ranges("scalar", &[]).unwrap_err();
    assert!(
        matches!(error, Error::NoRows { .. }) && error.to_string().contains("U8 []"),
        "{error}"
    );
}

/// Wakes the thread that runs a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs futures on this thread until all have ended.
fn block_on<T>(futures: Vec<Pin<Box<dyn Future<Output = T> + '_>>>) -> Vec<T> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut futures: Vec<_> = futures.into_iter().map(Ok).collect();
    while futures.iter().any(Result::is_ok) {
        let mut woken = false;
        for future in &mut futures {
            if let Ok(running) = future
                && let Poll::Ready(output) = running.as_mut().poll(&mut context)
            {
                (*future, woken) = (Err(output), true);
            }
        }
        if !woken {
            std::thread::park();
        }
    }
    futures.into_iter().filter_map(Result::err).collect()
}

async fn use_all(model: &Model) -> Result<(), Error> {
    for _ in 0..3 {
        let pass = model.pass_async().await?;
        for name in model.units() {
            let unit = pass.unit_async(name).await?;
            for (name, tensor) in unit.tensors() {
                assert!(tensor[..] == bytes(name), "{name}");
            }
            drop(unit);
            let rows = model.read_ranges_async("embed.weight", &[98..100]).await?;
            assert!(rows[..] == bytes("embed.weight")[98 * HIDDEN as usize..]);
        }
    }
    Ok(())
}

#[test]
fn futures_wait_without_a_runtime() {
    let dir = directory();
    let options = || Model::open(&dir).unwrap().budget(Bytes::kib(96));
    // Two tasks take turns to run passes, or run them at the same time.
    for passes in [1, 2] {
        let options = options().engine_config(|config| config.with_max_passes(passes));
        let model = options.build().unwrap();
        for result in block_on(vec![Box::pin(use_all(&model)), Box::pin(use_all(&model))]) {
            result.unwrap();
        }
        assert_eq!(model.engine().stats().passes, 6);
        assert!(model.engine().stats().in_use_high_water_bytes <= 96 << 10);
    }
}

#[test]
fn a_future_that_is_dropped_ends_its_wait() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().budget(Bytes::kib(64)).build().unwrap();
    let pass = model.pass().unwrap();
    let mut context = Context::from_waker(Waker::noop());
    for layer in 0..LAYERS {
        let name = format!("layers.{layer}");
        let mut unit = Box::pin(pass.unit_async(&name));
        let mut rows = Box::pin(model.read_ranges_async("embed.weight", &[0..50, 7..8]));
        // Whether the bytes are there at once depends on the machine.
        drop(unit.as_mut().poll(&mut context));
        drop(rows.as_mut().poll(&mut context));
    }
    for name in model.units() {
        assert!(pass.unit(name).unwrap().tensors().all(|(name, tensor)| tensor[..] == bytes(name)));
    }
}

#[test]
fn a_future_reports_memory_that_only_its_thread_could_free() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().budget(Bytes::kib(32)).build().unwrap();
    let pass = model.pass().unwrap();
    let held = async {
        let mut units = Vec::new();
        for name in model.units() {
            units.push(pass.unit_async(name).await?);
        }
        Ok(units.len())
    };
    let result: Result<usize, Error> = block_on(vec![Box::pin(held)]).remove(0);
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    pass.unit("layers.3").unwrap(); // the units are free again
}

#[test]
fn a_future_waits_for_memory_that_another_thread_is_about_to_free() {
    let dir = directory();
    let model = Model::open(&dir).unwrap().budget(Bytes::kib(32)).build().unwrap();
    let pass = model.pass().unwrap();
    let names: Vec<&str> = model.units().collect();
    for name in names {
        let unit = pass.unit(name).unwrap();
        let held: Vec<_> = unit.tensors().map(|(_, tensor)| tensor.clone()).collect();
        drop(unit);
        // No event tells the engine when this thread drops the tensors.
        let other = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(15));
            drop(held);
        });
        let next = if name == "layers.3" { "layers.4" } else { "layers.3" };
        let next: Vec<Pin<Box<dyn Future<Output = _> + '_>>> =
            vec![Box::pin(pass.unit_async(next))];
        for unit in block_on(next) {
            unit.unwrap();
        }
        other.join().unwrap();
    }
}
