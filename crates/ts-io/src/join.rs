// SPDX-License-Identifier: MIT OR Apache-2.0
//! Splits requests into parts for several backends, and joins the parts' completions.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ts_pool::Buffer;

use crate::backend::{Completion, CompletionSink, ReadRequest, Transfer};
use crate::{Error, Source};

/// Gives each part its own token. Completes a request, with the caller's token, when all of its
/// parts have completed.
pub(crate) struct Joiner {
    sink: CompletionSink,
    state: Mutex<JoinerState>,
}

#[derive(Default)]
struct JoinerState {
    next_token: u64,
    /// The parts in progress, by token.
    parts: HashMap<u64, Part>,
    /// The split requests in progress, by id.
    splits: HashMap<u64, SplitRequest>,
}

struct Part {
    split: u64,
    index: usize,
    source: Arc<Source>,
    offset: u64,
    required: usize,
    /// The backend that tried the part first, and its error, if another one tries it now.
    failed: Option<(&'static str, Error)>,
}

/// A request whose parts are in progress.
struct SplitRequest {
    token: u64,
    /// The lengths of the request's buffers.
    buffer_lens: Vec<usize>,
    /// The completions of the parts, by index.
    completions: Vec<Option<Completion>>,
    /// The number of parts in progress.
    pending: usize,
    /// The counter of the most recent `cancel` call for this request, if any.
    cancelled_by: Option<Arc<AtomicUsize>>,
}

impl Joiner {
    pub(crate) fn new(sink: CompletionSink) -> Self {
        Self { sink, state: Mutex::default() }
    }

    /// Returns the sink of a backend whose failed parts no other backend tries.
    pub(crate) fn sink(self: &Arc<Self>, backend: &'static str) -> CompletionSink {
        let joiner = Arc::clone(self);
        Box::new(move |completion| joiner.on_completion(backend, completion))
    }

    /// Splits a request into parts of the given lengths in bytes. Their sum must be the request's
    /// capacity.
    pub(crate) fn split(&self, request: ReadRequest, lens: &[usize]) -> Vec<ReadRequest> {
        let ReadRequest { token, source, mut offset, mut required, buffers } = request;
        let mut state = self.lock();
        let split = state.next_token;
        state.next_token += 1 + lens.len() as u64;
        let mut completions = Vec::new();
        completions.resize_with(lens.len(), || None);
        let buffer_lens = buffers.iter().map(|buffer| buffer.len()).collect();
        let pending = lens.len();
        let request = SplitRequest { token, buffer_lens, completions, pending, cancelled_by: None };
        state.splits.insert(split, request);
        let (mut rest, mut parts) = (buffers, Vec::new());
        for (index, &len) in lens.iter().enumerate() {
            let token = split + 1 + index as u64;
            let is_last = index + 1 == lens.len();
            let tail = if is_last { Vec::new() } else { split_off(&mut rest, len) };
            let (part_source, part_required) = (Arc::clone(&source), required.min(len));
            state.parts.insert(
                token,
                Part {
                    split,
                    index,
                    source: Arc::clone(&source),
                    offset,
                    required: part_required,
                    failed: None,
                },
            );
            parts.push(ReadRequest {
                token,
                source: part_source,
                offset,
                required: part_required,
                buffers: rest,
            });
            (offset, required) = (offset + len as u64, required.saturating_sub(len));
            rest = tail;
        }
        parts
    }

    /// Turns the completion of a part that `backend` could not read into a request for another
    /// backend.
    ///
    /// # Errors
    /// Returns the completion unchanged if the part was read, cannot be read by another backend
    /// either, was tried before, or was cancelled.
    pub(crate) fn retry(
        &self,
        backend: &'static str,
        completion: Completion,
    ) -> Result<ReadRequest, Completion> {
        let error = match &completion.result {
            Err(error) if error.is_of_backend() && !completion.buffers.is_empty() => error,
            _ => return Err(completion),
        };
        let mut state = self.lock();
        let JoinerState { parts, splits, .. } = &mut *state;
        let Some(part) = parts.get_mut(&completion.token) else { return Err(completion) };
        if part.failed.is_some() || splits[&part.split].cancelled_by.is_some() {
            drop(state);
            return Err(completion);
        }
        part.failed = Some((backend, error.clone()));
        let (source, offset, required) = (Arc::clone(&part.source), part.offset, part.required);
        let Completion { token, buffers, .. } = completion;
        Ok(ReadRequest { token, source, offset, required, buffers })
    }

    /// Records the completion of a part by `backend`. Completes the request after its last part.
    pub(crate) fn on_completion(&self, backend: &'static str, mut completion: Completion) {
        let mut state = self.lock();
        let Part { split, index, failed, source, offset, required } =
            state.parts.remove(&completion.token).expect("each part completes once");
        if let Some(before) = &failed {
            let range = (source.path(), offset, required);
            completion.result = completion.result.map_err(|e| e.after(before, backend, range));
        }
        let request =
            state.splits.get_mut(&split).expect("a split request outlives its pending parts");
        request.completions[index] = Some(completion);
        request.pending -= 1;
        if request.pending > 0 {
            return;
        }
        let mut request = state.splits.remove(&split).expect("`get_mut` found the request");
        drop(state);
        let cancelled_by = request.cancelled_by.take();
        let completion = request.join();
        if let (Some(count), Err(Error::Cancelled { .. })) = (cancelled_by, &completion.result) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        (self.sink)(completion);
    }

    /// Undoes the split of a request that has a single part, and returns the original request.
    pub(crate) fn withdraw(&self, mut request: ReadRequest) -> ReadRequest {
        let mut state = self.lock();
        let Part { split, .. } =
            state.parts.remove(&request.token).expect("a rejected part never completes");
        let split =
            state.splits.remove(&split).expect("a split request outlives its pending parts");
        request.token = split.token;
        request
    }

    /// Cancels the requests whose tokens satisfy `wanted`. Returns the number of requests that
    /// completed as cancelled during the call.
    ///
    /// `cancel` receives a predicate for the tokens of parts, and must cancel the parts that
    /// satisfy it. It must return only after the parts that had not started have completed.
    pub(crate) fn cancel(
        &self,
        wanted: &dyn Fn(u64) -> bool,
        cancel: impl FnOnce(&dyn Fn(u64) -> bool),
    ) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let mut state = self.lock();
        let JoinerState { parts, splits, .. } = &mut *state;
        for request in splits.values_mut().filter(|request| wanted(request.token)) {
            request.cancelled_by = Some(Arc::clone(&count));
        }
        let is_cancelled = |part: &Part| {
            splits[&part.split].cancelled_by.as_ref().is_some_and(|c| Arc::ptr_eq(c, &count))
        };
        let parts: HashSet<u64> =
            parts.iter().filter(|(_, part)| is_cancelled(part)).map(|(&token, _)| token).collect();
        drop(state);
        cancel(&|token| parts.contains(&token));
        count.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, JoinerState> {
        self.state.lock()
    }
}

impl SplitRequest {
    /// Joins the completions of the parts into the completion of the request.
    fn join(self) -> Completion {
        let (mut pieces, mut complete, mut error) = (Vec::new(), true, None);
        let mut sum: Option<Transfer> = None;
        for part in self.completions.into_iter().flatten() {
            // A part that timed out has no buffers if the system can still write to them.
            complete &= !part.buffers.is_empty();
            pieces.extend(part.buffers);
            match (part.result, &mut sum) {
                // A timeout takes precedence, because it explains why buffers are missing.
                (Err(e), _) if error.is_none() || matches!(e, Error::TimedOut { .. }) => {
                    error = Some(e);
                }
                (Err(_), _) => {}
                (Ok(transfer), None) => sum = Some(transfer),
                (Ok(transfer), Some(sum)) => sum.add(&transfer),
            }
        }
        let buffers = if complete { rebuild(pieces, &self.buffer_lens) } else { Vec::new() };
        let result = match (error, sum) {
            (Some(error), _) => Err(error),
            (None, sum) => Ok(sum.expect("without an error, a part has a transfer")),
        };
        Completion { token: self.token, buffers, result }
    }
}

impl Transfer {
    /// Adds the transfer of another part of the same request.
    fn add(&mut self, part: &Transfer) {
        self.started_ns = self.started_ns.min(part.started_ns);
        self.finished_ns = self.finished_ns.max(part.finished_ns);
        for &(path, bytes) in &part.paths {
            match self.paths.iter_mut().find(|known| known.0 == path) {
                Some(known) => known.1 += bytes,
                None => self.paths.push((path, bytes)),
            }
        }
    }
}

/// Splits a sequence of buffers at byte `at`. Keeps the bytes before `at` and returns the others.
fn split_off(buffers: &mut Vec<Buffer>, at: usize) -> Vec<Buffer> {
    let (mut index, mut left) = (0, at);
    while index < buffers.len() && buffers[index].len() <= left {
        left -= buffers[index].len();
        index += 1;
    }
    let mut tail = buffers.split_off(index);
    if left > 0 {
        let second = tail[0].split_off(left);
        buffers.push(std::mem::replace(&mut tail[0], second));
    }
    tail
}

/// Rebuilds buffers of the given lengths from the pieces into which they were split.
fn rebuild(pieces: Vec<Buffer>, lens: &[usize]) -> Vec<Buffer> {
    let mut pieces = pieces.into_iter();
    let mut buffers = Vec::with_capacity(lens.len());
    for &len in lens {
        let mut buffer = pieces.next().expect("each buffer consists of at least one piece");
        while buffer.len() < len {
            let next = pieces.next().expect("pieces and buffers have the same total length");
            buffer.unsplit(next).expect("consecutive pieces of one buffer are adjacent");
        }
        buffers.push(buffer);
    }
    buffers
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ts_pool::{Budget, HostPool};

    use super::*;

    #[test]
    fn a_timed_out_part_makes_the_whole_request_time_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = Source::open(file.path()).unwrap();
        let (sink, done) = crate::completion_queue();
        let joiner = Joiner::new(sink);
        let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
        let request = ReadRequest::new(7, source, 0, 8192, pool.allocate(8192).unwrap());
        let mut parts = joiner.split(request, &[4096, 4096]).into_iter();
        let (first, second) = (parts.next().unwrap(), parts.next().unwrap());
        let error = second.timed_out(std::time::Duration::from_secs(1));
        let cancelled = joiner.cancel(&|token| token == 7, |wanted| {
            assert!(wanted(first.token) && wanted(second.token));
            joiner.on_completion("direct", first.cancelled());
        });
        assert_eq!(cancelled, 0, "the second part is still in progress");
        joiner.on_completion(
            "direct",
            Completion { token: second.token, buffers: Vec::new(), result: Err(error) },
        );
        let whole = done.try_recv().unwrap();
        assert!(whole.token == 7 && whole.buffers.is_empty());
        assert!(matches!(whole.result, Err(Error::TimedOut { .. })), "{:?}", whole.result);
    }

    proptest! {
        #[test]
        fn rebuild_undoes_any_splits(
            lens in prop::collection::vec(0usize..9000, 1..6),
            cuts in prop::collection::vec(1usize..9000, 0..6),
        ) {
            let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
            let mut buffers: Vec<Buffer> =
                lens.iter().map(|&len| pool.allocate(len).unwrap()).collect();
            let (mut number, total) = (0u8, lens.iter().sum::<usize>());
            for byte in buffers.iter_mut().flat_map(|buffer| buffer.iter_mut()) {
                (*byte, number) = (number, number.wrapping_add(7));
            }
            let before: Vec<u8> = buffers.iter().flat_map(|b| b.iter().copied()).collect();
            let (mut parts, mut rest, mut left) = (Vec::new(), buffers, total);
            for cut in cuts.into_iter().take_while(|&cut| {
                left = left.saturating_sub(cut);
                left > 0
            }) {
                let tail = split_off(&mut rest, cut);
                prop_assert_eq!(rest.iter().map(|b| b.len()).sum::<usize>(), cut);
                parts.extend(std::mem::replace(&mut rest, tail));
            }
            parts.extend(rest);
            let rebuilt = rebuild(parts, &lens);
            prop_assert!(rebuilt.iter().map(|b| b.len()).eq(lens));
            prop_assert!(rebuilt.iter().flat_map(|b| b.iter().copied()).eq(before));
        }
    }
}
