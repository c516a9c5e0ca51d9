// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests how many bytes the engine reads for tensors that cannot be read in place: their own bytes,
//! and at most one alignment more at each end.

use ts_io::Registry;
use ts_orchestrator::{Engine, Phase, UnitStats};

use crate::testing::{KIB, Model, config, tensor};

/// The lengths of parts, in bytes. They range from less than a block to more than a bounce buffer.
const PARTS: [usize; 8] = [
    2 * KIB,
    64 * KIB,
    500 * KIB + 7,
    1016 * KIB,
    1024 * KIB,
    2048 * KIB,
    3000 * KIB + 1,
    9 * 1024 * KIB,
];

/// Creates a model of two units. Each unit has one tensor of these parts in reverse order. Every
/// part is copied, because the tensor has several parts or needs another phase than in the file.
fn reversed(parts: &[usize]) -> Model {
    let room: usize = parts.iter().map(|len| len + 4 * KIB).sum();
    let mut model = Model::new(&[room, room]);
    for (i, unit) in model.units.iter_mut().enumerate() {
        let mut offset = (13 + i * room) as u64;
        let mut ranges = Vec::new();
        for &len in parts {
            ranges.push((offset, len));
            offset += (len + 3 * KIB) as u64;
        }
        ranges.reverse();
        unit.tensors = vec![tensor("reversed", &ranges, Phase::At(24))];
    }
    model
}

#[test]
fn a_part_costs_at_most_two_alignments_more_than_its_bytes() {
    let single = PARTS[..5].iter().map(|&len| vec![len]);
    for parts in single.chain([PARTS.to_vec(), vec![2048 * KIB; 3]]) {
        let model = reversed(&parts);
        let sources = model.sources();
        let (plan, _) = Engine::preview(model.units.clone(), &sources, &config(1 << 30)).unwrap();
        let alignment = sources[0].direct_alignment().unwrap_or(512) as u64;
        let wanted = 2 * parts.iter().sum::<usize>() as u64;
        let limit = wanted + 2 * 2 * alignment * parts.len() as u64;
        let registry = Registry::builtin();
        let readable = |name: &&str| registry.choose(Some(name), &sources).is_ok();
        for backend in registry.names().into_iter().filter(readable) {
            let config = config(plan.smallest_budget_bytes).with_backend(backend.to_owned());
            let engine = model.engine(config).unwrap();
            for _ in 0..2 {
                model.pass(&engine, &[0, 1]);
            }
            let per_load = |unit: &UnitStats| unit.read_bytes / unit.loads;
            let read: u64 = engine.stats().units.iter().map(per_load).sum();
            assert!(wanted <= read && read <= limit, "{parts:?}: `{backend}` read {read}");
            let planned = engine.plan().streamed_bytes_per_pass;
            assert_eq!(planned, read, "{parts:?}: the plan predicts the bytes `{backend}` reads");
        }
    }
}
