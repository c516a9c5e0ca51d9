// SPDX-License-Identifier: MIT OR Apache-2.0
//! Routed units: what a pass is about to use, and guesses of it.

use std::sync::Arc;

use ts_streams::Device;

use crate::Error;
use crate::expectation::Expectation;
use crate::unit::{Access, UnitId};

use super::{Engine, Shared};

impl<D: Device> Engine<D> {
    /// Announces that a pass is about to acquire these [routed](crate::Access::Routed) units, each
    /// once and in this order. Does not block.
    ///
    /// The number after a unit is how often the pass uses it, such as the number of tokens of a
    /// batch that need an expert. Starts to read the units that are not in memory, all at once as
    /// far as memory allows. The units with most uses stay in memory, and recent passes count more.
    /// Ordered units are ignored.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    ///
    /// # Examples
    /// ```
    /// # use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
    /// # use ts_orchestrator::ts_io::Source;
    /// # use ts_orchestrator::{Phase, Unit, UnitTensor};
    /// use ts_orchestrator::{Access, Engine, EngineConfig, UnitId};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("experts");
    /// # std::fs::write(&path, vec![7; 64 * 1024])?;
    /// # let tensor = |i: u64| {
    /// #     let parts = vec![ByteRange { file: FileId(0), offset: i * 4096, len: 4096 }];
    /// #     let meta = TensorMeta { dtype: Dtype::U8, shape: vec![4096] };
    /// #     let entry = TensorEntry { meta, parts };
    /// #     let (digest, chunks, phase) = (None, Vec::new(), Phase::Mapped);
    /// #     UnitTensor { name: format!("expert {i}"), entry, phase, digest, chunks }
    /// # };
    /// // One unit for each expert.
    /// let experts = (0..16).map(|i| {
    ///     Unit::new(format!("expert {i}"), vec![tensor(i)]).with_access(Access::Routed)
    /// });
    /// let (units, sources) = (experts.collect(), vec![Source::open(&path)?]);
    /// let engine = Engine::new(units, sources, EngineConfig::with_budget(32 << 10))?;
    ///
    /// let pass = engine.begin_pass();
    /// let routed = [UnitId(3), UnitId(11)]; // the router's choice
    /// let expectation = engine.expect(&routed.map(|unit| (unit, 1)))?;
    /// for unit in routed {
    ///     assert_eq!(engine.acquire(Some(pass), unit)?.tensor(0)[0], 7); // compute with it here
    /// }
    /// drop(expectation);
    /// engine.end_pass(pass);
    /// assert_eq!(engine.stats().routed.touched, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn expect(&self, units: &[(UnitId, u32)]) -> Result<Expectation<D>, Error> {
        let shared = &self.shared;
        units.iter().try_for_each(|&(unit, _)| shared.check_unit(unit))?;
        let routed: Vec<_> =
            units.iter().copied().filter(|&(id, _)| shared.is_routed(id)).collect();
        let number = shared.lock().expect(&shared.context, &routed, (shared.clock)());
        Ok(Expectation::new(Arc::clone(shared), number))
    }

    /// Guesses that the next call of [`expect`](Self::expect) will name these units, the most
    /// likely one first. Does not block.
    ///
    /// Reads those that are not in memory while no other reads are waiting, unless most recent
    /// guesses were wrong. The next call of `expect` or `guess` cancels the reads of units that it
    /// does not name. Ordered units are ignored.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn guess(&self, units: &[UnitId]) -> Result<(), Error> {
        let shared = &*self.shared;
        units.iter().try_for_each(|&unit| shared.check_unit(unit))?;
        let routed: Vec<_> = units.iter().copied().filter(|&id| shared.is_routed(id)).collect();
        shared.lock().guess(&shared.context, &routed, (shared.clock)());
        Ok(())
    }

    /// Returns whether [`guess`](Self::guess) saves time at present: recently, expected units were
    /// not in memory, and most guesses were right. Even if it does not, a guess now and then shows
    /// when that has changed.
    pub fn guesses_pay(&self) -> bool {
        self.shared.lock().routed.guesses.pay()
    }

    /// Returns the score of each routed unit. An engine that is created with these scores
    /// ([`Routing::scores`](crate::Routing::scores)) keeps the same units in memory.
    pub fn routing_scores(&self) -> Vec<(UnitId, f64)> {
        self.shared.lock().routed.scores()
    }
}

impl<D: Device> Shared<D> {
    fn is_routed(&self, unit: UnitId) -> bool {
        self.unit(unit).unit.access == Access::Routed
    }

    pub(crate) fn end_expectation(&self, number: u64) {
        if !self.is_forked() {
            self.lock().end_expectation(number);
        }
    }
}
