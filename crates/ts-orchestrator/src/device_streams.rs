// SPDX-License-Identifier: MIT OR Apache-2.0
//! The streams of an engine on a device with its own memory, and the order of their work.

use std::sync::Arc;

use ts_streams::{
    AllocationStrategy, Device, Error, MultiStreamCoordinator, Pipeline, PooledStreamStats,
    StageGraph, StageId, StreamPool, StreamPriority, WorkloadType,
};

/// The streams come from a pool, which chooses one for each workload. Their order is a graph that
/// is built once, so a visit creates no events.
#[derive(Debug)]
pub(crate) struct DeviceStreams<D: Device> {
    pool: Arc<StreamPool<D>>,
    pipeline: Pipeline<D>,
    copy: StageId,
    compute: StageId,
    pieces: Vec<PieceStages>,
}

/// The stages of a piece that the device decodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceStages {
    /// Copies the stored bytes to the memory of the piece, after the piece before in this memory
    /// was decoded.
    pub(crate) copy: StageId,
    /// Decodes the piece to its slot.
    pub(crate) decode: StageId,
    /// Lets the stream that copies, and so the slot, wait for the decoded piece.
    pub(crate) decoded: StageId,
}

impl<D: Device> DeviceStreams<D> {
    /// `pieces` is the number of pieces of memory for decoding, 0 if the device does not decode.
    pub(crate) fn new(device: &D, pieces: usize) -> Result<Self, Error> {
        let mut graph = StageGraph::new();
        let copy = graph.add("copy", WorkloadType::Memory, &[]);
        let stages = |number: usize| {
            let copy = graph.add(format!("copy {number}"), WorkloadType::Memory, &[]);
            let decode = graph.add(format!("decode {number}"), WorkloadType::Compute, &[copy]);
            graph.repeat_after(copy, decode);
            let decoded = graph.add(format!("decoded {number}"), WorkloadType::Memory, &[decode]);
            PieceStages { copy, decode, decoded }
        };
        let pieces: Vec<PieceStages> = (0..pieces).map(stages).collect();
        // What computes with a unit waits for the copy of that unit only: `UnitMemory::use_on`.
        let compute = graph.add("compute", WorkloadType::Mixed, &[]);
        // One for each workload. Kernels that decode are as urgent as those of the model.
        let priorities = vec![StreamPriority::Normal; if pieces.is_empty() { 2 } else { 3 }];
        let strategy = AllocationStrategy::Workload;
        let pool = StreamPool::with_priorities(device.clone(), &priorities, strategy)?;
        let pool = Arc::new(pool);
        let pipeline = MultiStreamCoordinator::with_pool(Arc::clone(&pool)).pipeline(&graph)?;
        Ok(Self { pool, pipeline, copy, compute, pieces })
    }

    pub(crate) fn pipeline(&self) -> &Pipeline<D> {
        &self.pipeline
    }

    /// Returns the stream that copies units to the device.
    pub(crate) fn copies(&self) -> &D::Stream {
        self.pipeline.stream(self.copy)
    }

    /// Returns a stream for work of the caller.
    pub(crate) fn compute(&self) -> &D::Stream {
        self.pipeline.stream(self.compute)
    }

    /// Returns the stages of a piece.
    pub(crate) fn piece(&self, number: usize) -> PieceStages {
        self.pieces[number]
    }

    pub(crate) fn stats(&self) -> Vec<PooledStreamStats> {
        self.pool.stats()
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;

    use ts_streams::{HostFn, MemoryKind, RawMemory, SimDevice, SimOptions, Stream};

    use super::*;

    /// The race detector would find a stage that misses a wait, in any schedule.
    #[test]
    fn the_stages_of_pieces_are_ordered() {
        let device = SimDevice::new(SimOptions::default().with_stall_rate(0.5));
        let streams = DeviceStreams::new(&device, 2).unwrap();
        let layout = Layout::from_size_align(256, 64).unwrap();
        let [first, second, slot] =
            [(); 3].map(|()| device.allocate(layout, MemoryKind::Device).unwrap());
        let memory = [first.range(), second.range()];
        let pipeline = streams.pipeline();
        for turn in 0..20 {
            let (stages, piece) = (streams.piece(turn % 2), memory[turn % 2]);
            let work = HostFn::new(|| ()).writes(piece);
            pipeline.run(stages.copy, |stream| stream.launch_host_fn(work)).unwrap();
            let work = HostFn::new(|| ()).reads(piece).writes(slot.range());
            pipeline.run(stages.decode, |stream| stream.launch_host_fn(work)).unwrap();
            if turn % 4 == 3 {
                // The unit ends. The next one is copied to the same slot.
                pipeline.run(stages.decoded, |_| Ok::<_, Error>(())).unwrap();
                let work = HostFn::new(|| ()).writes(slot.range());
                streams.copies().launch_host_fn(work).unwrap();
                let again = streams.piece((turn + 1) % 2);
                pipeline.run(again.copy, |_| Ok::<_, Error>(())).unwrap();
            }
        }
        pipeline.synchronize().unwrap();
        assert_eq!(device.races(), []);
        let workloads: Vec<_> = streams.stats().iter().map(|stream| stream.workload).collect();
        let [memory, compute, mixed] =
            [WorkloadType::Memory, WorkloadType::Compute, WorkloadType::Mixed].map(Some);
        assert_eq!(workloads, [memory, compute, mixed]);
    }
}
