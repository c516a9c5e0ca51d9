// SPDX-License-Identifier: MIT OR Apache-2.0
//! A graph of tasks on two devices: the CPU prepares two batches, and a simulated GPU uses each one
//! after it is prepared.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::{Arc, Mutex};

use ts_streams::{
    CancelToken, Device, DeviceRegistry, MultiStreamCoordinator, Stream, StreamPriority, TaskGraph,
};

fn main() -> Result<(), Box<dyn Error>> {
    let registry = DeviceRegistry::builtin();
    let (cpu, gpu) = (registry.open(Some("cpu"))?, registry.open(Some("sim"))?);
    let on_cpu = cpu.create_stream(StreamPriority::Normal)?;
    let on_gpu = gpu.create_stream(StreamPriority::High)?;
    let coordinator = MultiStreamCoordinator::new(cpu, vec![on_cpu.clone()])
        .with_device(gpu, vec![on_gpu.clone()]);

    let done = Arc::new(Mutex::new(Vec::new()));
    let mut graph = TaskGraph::new();
    let mut add = |name: &'static str, stream| {
        let done = Arc::clone(&done);
        let task = graph.add_host_fn(name, move || done.lock().expect("no panic").push(name));
        graph.set_stream(task, stream);
        task
    };
    let (use_a, use_b) = (add("use a", on_gpu.id()), add("use b", on_gpu.id()));
    let (prepare_a, prepare_b) = (add("prepare a", on_cpu.id()), add("prepare b", on_cpu.id()));
    graph.add_dependency(use_a, prepare_a)?;
    graph.add_dependency(use_b, prepare_b)?;
    graph.add_dependency(use_b, use_a)?;
    assert!(graph.add_dependency(prepare_a, use_b).is_err(), "it would close a cycle");

    let execution = coordinator.execute(graph, &CancelToken::default());
    execution.wait()?;
    assert!(execution.failures().is_empty());
    let done = done.lock().expect("no panic");
    let at = |name| done.iter().position(|&task| task == name);
    assert!(at("prepare a") < at("use a") && at("prepare b") < at("use b"));
    assert!(at("use a") < at("use b") && done.len() == 4);
    println!("{done:?}");
    Ok(())
}
