// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests that are read in parts, by whichever backend is best for each, and put together again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ts_pool::Buffer;

use crate::Error;
use crate::backend::{Completion, CompletionSink, ReadRequest, Transfer};

/// Names the parts for the backends that read them, and gives the caller its own names back.
pub(crate) struct Joiner {
    sink: CompletionSink,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    parts: HashMap<u64, Part>,
    groups: HashMap<u64, Group>,
}

/// Where a part belongs.
#[derive(Clone, Copy)]
struct Part {
    group: u64,
    index: usize,
}

/// A request whose parts are under way.
struct Group {
    token: u64,
    /// Of the request's buffers.
    lens: Vec<usize>,
    done: Vec<Option<Completion>>,
    missing: usize,
    /// Where the call counts that is taking this request back.
    taken_back: Option<Arc<AtomicUsize>>,
}

impl Joiner {
    pub(crate) fn new(sink: CompletionSink) -> Self {
        Self { sink, table: Mutex::default() }
    }

    /// Cuts a request into parts of these lengths, which make up its room.
    pub(crate) fn split(&self, request: ReadRequest, lens: &[usize]) -> Vec<ReadRequest> {
        let ReadRequest { token, source, mut offset, mut required, buffers } = request;
        let mut table = self.lock();
        let group = table.next;
        table.next += 1 + lens.len() as u64;
        let mut missing = Group {
            token,
            lens: Vec::new(),
            done: Vec::new(),
            missing: lens.len(),
            taken_back: None,
        };
        missing.lens = buffers.iter().map(|buffer| buffer.len()).collect();
        missing.done.resize_with(lens.len(), || None);
        table.groups.insert(group, missing);
        let (mut rest, mut parts) = (buffers, Vec::new());
        for (index, &len) in lens.iter().enumerate() {
            let token = group + 1 + index as u64;
            table.parts.insert(token, Part { group, index });
            let last = index + 1 == lens.len();
            let behind = if last { Vec::new() } else { split_off(&mut rest, len) };
            let source = source.clone();
            parts.push(ReadRequest {
                token,
                source,
                offset,
                required: required.min(len),
                buffers: rest,
            });
            (offset, required) = (offset + len as u64, required.saturating_sub(len));
            rest = behind;
        }
        parts
    }

    /// Takes a part that ended; passes the request on with the last of them.
    pub(crate) fn on_completion(&self, completion: Completion) {
        let mut table = self.lock();
        let Part { group, index } =
            table.parts.remove(&completion.token).expect("each part ends once");
        let waiting = table.groups.get_mut(&group).expect("a group waits for its parts");
        waiting.done[index] = Some(completion);
        waiting.missing -= 1;
        if waiting.missing > 0 {
            return;
        }
        let mut group = table.groups.remove(&group).expect("just seen");
        drop(table);
        let taken_back = group.taken_back.take();
        let completion = group.joined();
        if let (Some(count), Err(Error::Cancelled { .. })) = (taken_back, &completion.result) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        (self.sink)(completion);
    }

    /// Takes a request's only part out again, as if it had never been split.
    pub(crate) fn withdraw(&self, mut request: ReadRequest) -> ReadRequest {
        let mut table = self.lock();
        let Part { group, .. } = table.parts.remove(&request.token).expect("it has not ended");
        request.token = table.groups.remove(&group).expect("a group waits for its parts").token;
        request
    }

    /// Takes requests back: `cancel` is to do so with the parts that it is told, and returns when
    /// those that have not begun have ended. Returns how many requests ended so.
    pub(crate) fn cancel(
        &self,
        wanted: &dyn Fn(u64) -> bool,
        cancel: impl FnOnce(&dyn Fn(u64) -> bool),
    ) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let mut table = self.lock();
        let Table { parts, groups, .. } = &mut *table;
        for group in groups.values_mut().filter(|group| wanted(group.token)) {
            group.taken_back = Some(Arc::clone(&count));
        }
        let asked = |part: &Part| {
            groups[&part.group].taken_back.as_ref().is_some_and(|c| Arc::ptr_eq(c, &count))
        };
        let parts: HashSet<u64> =
            parts.iter().filter(|(_, part)| asked(part)).map(|(&token, _)| token).collect();
        drop(table);
        cancel(&|token| parts.contains(&token));
        count.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

impl Group {
    fn joined(self) -> Completion {
        let (mut pieces, mut whole, mut error) = (Vec::new(), true, None);
        let mut sum: Option<Transfer> = None;
        for part in self.done.into_iter().flatten() {
            // What a read that timed out was to fill is still the system's.
            whole &= !part.buffers.is_empty();
            pieces.extend(part.buffers);
            match (part.result, &mut sum) {
                // Above all that buffers are missing.
                (Err(e), _) if error.is_none() || matches!(e, Error::TimedOut { .. }) => {
                    error = Some(e);
                }
                (Err(_), _) => {}
                (Ok(transfer), None) => sum = Some(transfer),
                (Ok(transfer), Some(sum)) => sum.add(&transfer),
            }
        }
        let buffers = if whole { rebuild(pieces, &self.lens) } else { Vec::new() };
        let result = match (error, sum) {
            (Some(error), _) => Err(error),
            (None, sum) => Ok(sum.expect("a request has at least one part")),
        };
        Completion { token: self.token, buffers, result }
    }
}

impl Transfer {
    /// Another part of the same request.
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

/// Keeps the first `at` bytes of buffers that stand one behind the other, and returns the others.
fn split_off(buffers: &mut Vec<Buffer>, at: usize) -> Vec<Buffer> {
    let (mut index, mut left) = (0, at);
    while index < buffers.len() && buffers[index].len() <= left {
        left -= buffers[index].len();
        index += 1;
    }
    let mut behind = buffers.split_off(index);
    if left > 0 {
        let tail = behind[0].split_off(left);
        buffers.push(std::mem::replace(&mut behind[0], tail));
    }
    behind
}

/// The buffers of these lengths that `pieces` were cut from.
fn rebuild(pieces: Vec<Buffer>, lens: &[usize]) -> Vec<Buffer> {
    let mut pieces = pieces.into_iter();
    let mut buffers = Vec::with_capacity(lens.len());
    for &len in lens {
        let mut buffer = pieces.next().expect("every buffer has its pieces");
        while buffer.len() < len {
            let next = pieces.next().expect("the pieces are as long as the buffers");
            buffer.unsplit(next).expect("they were neighbours");
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
    fn a_request_whose_buffers_are_missing_has_timed_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = crate::Source::open(file.path()).unwrap();
        let (sink, done) = crate::completion_queue();
        let joiner = Joiner::new(sink);
        let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
        let request = ReadRequest::new(7, source, 0, 8192, pool.allocate(8192).unwrap());
        let mut parts = joiner.split(request, &[4096, 4096]).into_iter();
        let (first, second) = (parts.next().unwrap(), parts.next().unwrap());
        let error = second.timed_out(std::time::Duration::from_secs(1));
        let taken_back = joiner.cancel(&|token| token == 7, |wanted| {
            assert!(wanted(first.token) && wanted(second.token));
            joiner.on_completion(first.cancelled());
        });
        assert_eq!(taken_back, 0, "part of it is under way");
        joiner.on_completion(Completion {
            token: second.token,
            buffers: Vec::new(),
            result: Err(error),
        });
        let whole = done.try_recv().unwrap();
        assert!(whole.token == 7 && whole.buffers.is_empty());
        assert!(matches!(whole.result, Err(Error::TimedOut { .. })), "{:?}", whole.result);
    }

    proptest! {
        #[test]
        fn what_is_split_is_rebuilt(
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
                let behind = split_off(&mut rest, cut);
                prop_assert_eq!(rest.iter().map(|b| b.len()).sum::<usize>(), cut);
                parts.extend(std::mem::replace(&mut rest, behind));
            }
            parts.extend(rest);
            let rebuilt = rebuild(parts, &lens);
            prop_assert!(rebuilt.iter().map(|b| b.len()).eq(lens));
            prop_assert!(rebuilt.iter().flat_map(|b| b.iter().copied()).eq(before));
        }
    }
}
