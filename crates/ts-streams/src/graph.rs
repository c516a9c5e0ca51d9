// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs of tasks that submit work to streams.

use std::collections::HashMap;
use std::fmt;

use petgraph::algo::{has_path_connecting, toposort};
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use crate::{Error, HostFn, Stream, StreamId, WorkloadType};

/// Identifies a task of a [`TaskGraph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TaskId(NodeIndex);

/// The function of a task, which submits work to a stream.
pub(crate) type Submit<S> = Box<dyn FnOnce(&S) -> Result<(), Error> + Send>;

/// A directed acyclic graph of tasks, each of which submits work to a stream.
///
/// [`MultiStreamCoordinator::execute`](crate::MultiStreamCoordinator::execute) runs the graph.
/// [`add_dependency`](Self::add_dependency) returns an error if a dependency would close a cycle.
///
/// # Examples
/// ```
/// use ts_streams::{CpuStream, Error, TaskGraph};
///
/// let mut graph = TaskGraph::<CpuStream>::new();
/// let load = graph.add_host_fn("load", || println!("loaded"));
/// let compute = graph.add_host_fn("compute", || println!("computed"));
/// graph.add_dependency(compute, load)?; // `compute` waits for `load`
/// assert!(matches!(graph.add_dependency(load, compute), Err(Error::Cycle { .. })));
/// # Ok::<(), Error>(())
/// ```
pub struct TaskGraph<S> {
    tasks: DiGraph<Task<S>, ()>,
}

pub(crate) struct Task<S> {
    pub(crate) name: String,
    pub(crate) submit: Submit<S>,
    pub(crate) wanted: Wanted,
}

/// What a task asks of its stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) workload: WorkloadType,
    pub(crate) stream: Option<StreamId>,
}

impl<S> fmt::Debug for TaskGraph<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.tasks.node_weights().map(|task| task.name.as_str()).collect();
        f.debug_struct("TaskGraph")
            .field("tasks", &names)
            .field("order", &self.tasks.edge_count())
            .finish()
    }
}

impl<S: Stream> Default for TaskGraph<S> {
    fn default() -> Self {
        Self { tasks: DiGraph::new() }
    }
}

impl<S: Stream> TaskGraph<S> {
    /// Creates an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a task and returns its identifier. Errors name the task by `name`.
    ///
    /// The thread that executes the graph calls `submit` at most once, with the stream chosen for
    /// the task. Work that `submit` submits to this stream runs after the task's dependencies.
    /// `submit` should not block.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        submit: impl FnOnce(&S) -> Result<(), Error> + Send + 'static,
    ) -> TaskId {
        let wanted = Wanted { workload: WorkloadType::Mixed, stream: None };
        TaskId(self.tasks.add_node(Task { name: name.into(), submit: Box::new(submit), wanted }))
    }

    /// Sets the kind of work of a task, by which a pool chooses its stream. It is
    /// [`Mixed`](WorkloadType::Mixed) otherwise.
    ///
    /// # Panics
    /// Panics if the graph has no such task.
    pub fn set_workload(&mut self, task: TaskId, workload: WorkloadType) {
        self.tasks[task.0].wanted.workload = workload;
    }

    /// Sets the stream of a task, for example because its memory is on the device of the stream.
    /// If the coordinator does not have this stream, the task fails with [`Error::ForeignStream`].
    ///
    /// # Panics
    /// Panics if the graph has no such task.
    pub fn set_stream(&mut self, task: TaskId, stream: StreamId) {
        self.tasks[task.0].wanted.stream = Some(stream);
    }

    /// Adds a task that runs a function on the host, and returns the identifier of the task.
    pub fn add_host_fn(
        &mut self,
        name: impl Into<String>,
        run: impl FnOnce() + Send + 'static,
    ) -> TaskId {
        self.add(name, move |stream| stream.launch_host_fn(HostFn::new(run)))
    }

    /// Makes `later` wait for `earlier`. Repeating a dependency has no effect.
    ///
    /// # Errors
    /// Returns [`Error::Cycle`] if the dependency would close a cycle. The graph is then unchanged.
    ///
    /// # Panics
    /// May panic if one of the identifiers comes from another graph. If the call does not panic,
    /// the identifier is taken for that of an unrelated task.
    pub fn add_dependency(&mut self, later: TaskId, earlier: TaskId) -> Result<(), Error> {
        let (later, earlier) = (later.0, earlier.0);
        if has_path_connecting(&self.tasks, later, earlier, None) {
            return Err(Error::Cycle { path: self.path(later, earlier) });
        }
        self.tasks.update_edge(earlier, later, ());
        Ok(())
    }

    /// Returns the number of tasks.
    pub fn len(&self) -> usize {
        self.tasks.node_count()
    }

    /// Returns whether the graph has no tasks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the task names on a shortest path between two tasks, followed by the first name
    /// again.
    fn path(&self, from: NodeIndex, to: NodeIndex) -> Vec<String> {
        let path = petgraph::algo::astar(&self.tasks, from, |at| at == to, |_| 1, |_| 0);
        let (_, mut path) = path.unwrap_or((0, vec![from]));
        path.push(from);
        path.into_iter().map(|at| self.tasks[at].name.clone()).collect()
    }

    /// Returns the tasks in topological order. For each task also returns the positions of its
    /// direct dependencies, without those that another dependency already implies.
    pub(crate) fn into_order(self) -> (Vec<Task<S>>, Vec<Vec<usize>>) {
        let order = toposort(&self.tasks, None).expect("`add_dependency` rejects cycles");
        let position: HashMap<NodeIndex, usize> =
            order.iter().enumerate().map(|(i, &at)| (at, i)).collect();
        let direct = order.iter().map(|&at| {
            let before = self.tasks.edges_directed(at, petgraph::Direction::Incoming);
            before.map(|edge| position[&edge.source()]).collect::<Vec<_>>()
        });
        let waits = transitive_reduction(&direct.collect::<Vec<_>>());
        let (nodes, _) = self.tasks.into_nodes_edges();
        let mut tasks: Vec<Option<Task<S>>> =
            nodes.into_iter().map(|node| Some(node.weight)).collect();
        let tasks = order
            .iter()
            .map(|at| tasks[at.index()].take().expect("each task occurs once in the order"))
            .collect();
        (tasks, waits)
    }
}

/// Computes the transitive reduction of a graph given by each task's predecessors (Aho, Garey and
/// Ullman, 1972).
fn transitive_reduction(direct: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let words = direct.len().div_ceil(64);
    let mut before = vec![vec![0u64; words]; direct.len()];
    let mut kept = Vec::with_capacity(direct.len());
    for (i, predecessors) in direct.iter().enumerate() {
        let mut predecessors = predecessors.clone();
        // Visit the latest predecessor first, because it may already imply earlier ones.
        predecessors.sort_unstable_by(|a, b| b.cmp(a));
        let mut seen = vec![0u64; words];
        predecessors.retain(|&p| {
            let is_new = seen[p / 64] >> (p % 64) & 1 == 0;
            if is_new {
                seen[p / 64] |= 1 << (p % 64);
                seen.iter_mut().zip(&before[p]).for_each(|(seen, before)| *seen |= before);
            }
            is_new
        });
        before[i] = seen;
        kept.push(predecessors);
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::CpuStream;

    #[test]
    fn a_cycle_error_names_the_tasks_on_the_cycle() {
        let mut graph = TaskGraph::<CpuStream>::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| graph.add_host_fn(name, || ()));
        graph.add_dependency(b, a).unwrap();
        graph.add_dependency(c, b).unwrap();
        let refused = graph.add_dependency(a, c).unwrap_err();
        assert_eq!(refused, Error::Cycle { path: ["a", "b", "c", "a"].map(String::from).to_vec() });
        assert!(graph.add_dependency(a, a).is_err());
        graph.add_dependency(c, a).unwrap();
        assert_eq!(graph.into_order().1, [vec![], vec![0], vec![1]]);
    }

    /// Returns, for each task, which tasks come before it.
    fn closure(direct: &[Vec<usize>]) -> Vec<Vec<bool>> {
        let mut before = vec![vec![false; direct.len()]; direct.len()];
        for (i, predecessors) in direct.iter().enumerate() {
            for &p in predecessors {
                let (earlier, own) = before.split_at_mut(i);
                own[0][p] = true;
                own[0].iter_mut().zip(&earlier[p]).for_each(|(own, theirs)| *own |= theirs);
            }
        }
        before
    }

    proptest! {
        #[test]
        fn the_reduction_keeps_every_dependency(
            direct in prop::collection::vec(
                prop::collection::vec(any::<prop::sample::Index>(), 0..6),
                1..90,
            ),
        ) {
            let direct: Vec<Vec<usize>> = direct
                .iter()
                .enumerate()
                .map(|(i, predecessors)| {
                    predecessors.iter().filter(|_| i > 0).map(|p| p.index(i)).collect()
                })
                .collect();
            let fewer = transitive_reduction(&direct);
            prop_assert_eq!(closure(&fewer), closure(&direct));
            for (i, predecessors) in fewer.iter().enumerate() {
                for (at, _) in predecessors.iter().enumerate() {
                    let mut less = fewer.clone();
                    less[i].remove(at);
                    prop_assert_ne!(closure(&less), closure(&direct), "an edge is redundant");
                }
            }
        }
    }
}
