// SPDX-License-Identifier: MIT OR Apache-2.0
//! Orders of work that are built once and run many times.

use crate::{Device, Error, Event, Stream, WorkloadType};

/// Identifies a stage of a [`StageGraph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageId(usize);

/// The stages of work that is repeated, and their order.
///
/// A stage names only stages that were added before, so the order has no cycle.
/// [`MultiStreamCoordinator::pipeline`](crate::MultiStreamCoordinator::pipeline) assigns streams.
#[derive(Debug, Clone, Default)]
pub struct StageGraph {
    stages: Vec<Stage>,
}

#[derive(Debug, Clone)]
struct Stage {
    name: String,
    workload: WorkloadType,
    /// The stages whose latest run this one waits for.
    after: Vec<StageId>,
}

impl StageGraph {
    /// Creates a graph without stages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a stage. Each of its runs waits for the latest run of each stage in `after`.
    ///
    /// # Panics
    /// Panics if a stage in `after` is not one of this graph.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        workload: WorkloadType,
        after: &[StageId],
    ) -> StageId {
        assert!(after.iter().all(|stage| stage.0 < self.stages.len()), "stages of this graph");
        self.stages.push(Stage { name: name.into(), workload, after: after.to_vec() });
        StageId(self.stages.len() - 1)
    }

    /// Makes each run of `stage` wait for the previous run of `earlier`, which may have been added
    /// later: for example to reuse a buffer that `earlier` reads.
    ///
    /// # Panics
    /// Panics if the stages are not those of this graph.
    pub fn repeat_after(&mut self, stage: StageId, earlier: StageId) {
        assert!(earlier.0 < self.stages.len(), "a stage of this graph");
        self.stages[stage.0].after.push(earlier);
    }

    /// Returns the number of stages.
    pub fn len(&self) -> usize {
        self.stages.len()
    }

    /// Returns whether the graph has no stages.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Returns the different workloads, in the order of their first stages.
    pub(crate) fn workloads(&self) -> Vec<WorkloadType> {
        let mut all = Vec::new();
        for stage in &self.stages {
            if !all.contains(&stage.workload) {
                all.push(stage.workload);
            }
        }
        all
    }
}

/// Stages with streams and events, which are run again and again.
///
/// A run of a stage creates nothing: it waits for events that exist, and records one if a stage on
/// another stream waits for it.
///
/// # Examples
/// Copies to one buffer, while the other one is read:
/// ```
/// use std::sync::Arc;
/// use ts_streams::{
///     AllocationStrategy, CpuDevice, Device, Error, HostFn, MultiStreamCoordinator, StageGraph,
///     Stream, StreamPool, WorkloadType,
/// };
///
/// let mut graph = StageGraph::new();
/// let stages = [0, 1].map(|buffer| {
///     let copy = graph.add(format!("copy {buffer}"), WorkloadType::Memory, &[]);
///     let sum = graph.add(format!("sum {buffer}"), WorkloadType::Compute, &[copy]);
///     graph.repeat_after(copy, sum); // the buffer is free when it was summed
///     (copy, sum)
/// });
/// let pool = StreamPool::new(CpuDevice::new()?, 4, AllocationStrategy::Workload)?;
/// let pipeline = MultiStreamCoordinator::with_pool(Arc::new(pool)).pipeline(&graph)?;
/// for piece in 0..10 {
///     let (copy, sum) = stages[piece % 2];
///     pipeline.run(copy, |stream| stream.launch_host_fn(HostFn::new(|| ())))?;
///     pipeline.run(sum, |stream| stream.launch_host_fn(HostFn::new(|| ())))?;
/// }
/// pipeline.synchronize()?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Pipeline<D: Device> {
    stages: Box<[PlacedStage<D>]>,
}

#[derive(Debug)]
struct PlacedStage<D: Device> {
    name: String,
    stream: D::Stream,
    waits: Vec<D::Event>,
    /// Recorded after the stage, if a stage on another stream waits for it.
    done: Option<D::Event>,
}

impl<D: Device> Pipeline<D> {
    pub(crate) fn new(
        graph: &StageGraph,
        streams: &[(WorkloadType, D::Stream)],
        new_event: impl Fn(&D::Stream) -> Result<D::Event, Error>,
    ) -> Result<Self, Error> {
        let stream_of = |stage: &Stage| {
            let found = streams.iter().find(|(workload, _)| *workload == stage.workload);
            &found.expect("each workload has a stream").1
        };
        let needs_event = |id: usize| {
            let own = stream_of(&graph.stages[id]).id();
            let mut others = graph.stages.iter().filter(|other| other.after.contains(&StageId(id)));
            others.any(|other| stream_of(other).id() != own)
        };
        let done =
            graph.stages.iter().enumerate().map(|(id, stage)| {
                needs_event(id).then(|| new_event(stream_of(stage))).transpose()
            });
        let done = done.collect::<Result<Vec<_>, _>>()?;
        let placed = graph.stages.iter().zip(&done).map(|(stage, own)| {
            let stream = stream_of(stage).clone();
            let other = |before: &&StageId| stream_of(&graph.stages[before.0]).id() != stream.id();
            let waits =
                stage.after.iter().filter(other).filter_map(|before| done[before.0].clone());
            PlacedStage {
                name: stage.name.clone(),
                waits: waits.collect(),
                stream,
                done: own.clone(),
            }
        });
        Ok(Self { stages: placed.collect() })
    }

    /// Returns the stream of a stage.
    ///
    /// # Panics
    /// Panics if the pipeline has no such stage.
    pub fn stream(&self, stage: StageId) -> &D::Stream {
        &self.stages[stage.0].stream
    }

    /// Returns the name of each stage, and its stream.
    pub fn stages(&self) -> impl Iterator<Item = (&str, &D::Stream)> {
        self.stages.iter().map(|stage| (stage.name.as_str(), &stage.stream))
    }

    /// Runs a stage: its stream waits for the latest runs of the stages before it, and `submit`
    /// submits the work. Does not block, except between devices of different kinds, as
    /// [`MultiStreamCoordinator::order`](crate::MultiStreamCoordinator::order) does.
    ///
    /// # Errors
    /// Returns the error of `submit`, or the error of a stream that has failed. The latest run of
    /// the stage is then still the one before.
    ///
    /// # Panics
    /// Panics if the pipeline has no such stage.
    pub fn run<E: From<Error>>(
        &self,
        stage: StageId,
        submit: impl FnOnce(&D::Stream) -> Result<(), E>,
    ) -> Result<(), E> {
        let PlacedStage { stream, waits, done, .. } = &self.stages[stage.0];
        for event in waits {
            wait_for(stream, event)?;
        }
        submit(stream)?;
        if let Some(done) = done {
            stream.record(done)?;
        }
        Ok(())
    }

    /// Blocks until all runs of all stages are done, even if a stream has failed.
    ///
    /// # Errors
    /// Returns the error of a stream that has failed, or [`Error::WaitInHostFn`] if called from a
    /// host function.
    pub fn synchronize(&self) -> Result<(), Error> {
        let ended: Vec<_> = self.stages.iter().map(|stage| stage.stream.synchronize()).collect();
        ended.into_iter().collect()
    }
}

/// Makes a stream wait for an event. If their devices cannot wait for each other, the host waits.
pub(crate) fn wait_for<S: Stream>(stream: &S, event: &S::Event) -> Result<(), Error> {
    match stream.wait(event) {
        Err(Error::MixedDevices { .. }) => event.synchronize(),
        waited => waited,
    }
}
