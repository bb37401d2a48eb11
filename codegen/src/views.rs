//! Which buffers share storage: the result of an operator that only renames bytes (`Reshape`) lies where its operand does.
//!
//! A result joins its operand's storage where both can be read as long as they are needed: nothing writes one of them while
//! another is still to be read. Everything else stays a copy. So an all-reduce in place, the new content of a state, or
//! a sum over micro-batches never changes a value under a reader.
//!
//! Positions are those of the lists put one after the other, which is the order in which the buffers of one micro-batch
//! are used. Persistent buffers serve all micro-batches: where the forward or backward list writes one (a sum over
//! micro-batches), only the update may have views of it.
//!
//! Read next: [`crate::assemble`], which gives each storage its place.

use autoshard_runtime::program::{BufferId, List};

use crate::partition::{Lasting, Stage};

/// Where a buffer is touched, as positions; see the module.
#[derive(Debug, Clone, Default)]
struct Touched {
    /// Writes that change memory, ascending.
    writes: Vec<usize>,
    /// First write, moving or not.
    born: Option<usize>,
    /// Last read or write.
    last: Option<usize>,
}

/// A result and operand that could share storage, at a position.
struct Candidate {
    at: usize,
    from: usize,
    to: usize,
}

/// By buffer, the buffer whose place it has: itself, or the one that it is a view of.
pub fn storage(stage: &Stage) -> Vec<BufferId> {
    let (mut touched, candidates) = touched(stage);
    let persistent = |b: usize| stage.lasting[b] == Lasting::Persistent;
    let before = |l: List| -> usize { stage.lists[..l as usize].iter().map(Vec::len).sum() };
    let micro_batch = before(List::Forward)..before(List::Update);
    let mut root: Vec<usize> = (0..stage.buffers.len()).collect();
    let mut members: Vec<Vec<usize>> = root.iter().map(|b| vec![*b]).collect();
    for Candidate { at, from, to } in candidates {
        let r = root[from];
        let new = root[to] == to && members[to].len() == 1 && r != to && touched[to].born == Some(at);
        let summed = persistent(r) && touched[r].writes.iter().any(|w| micro_batch.contains(w));
        if !new || persistent(to) || (summed && micro_batch.contains(&at)) {
            continue;
        }
        // As a view it would write nothing here.
        let as_copy = touched[to].writes.clone();
        touched[to].writes.retain(|w| *w != at);
        let harmed = |m: usize, by: usize| {
            let until = if persistent(m) { Some(usize::MAX) } else { touched[m].last };
            touched[by].writes.iter().any(|w| touched[m].born.is_none_or(|b| b < *w) && until.is_some_and(|u| *w <= u))
        };
        if members[r].iter().any(|&m| harmed(m, to) || harmed(to, m)) {
            touched[to].writes = as_copy;
            continue;
        }
        root[to] = r;
        members[r].push(to);
    }
    root.into_iter().map(|b| BufferId(b as u32)).collect()
}

fn touched(stage: &Stage) -> (Vec<Touched>, Vec<Candidate>) {
    let mut touched = vec![Touched::default(); stage.buffers.len()];
    let mut candidates = Vec::new();
    for (at, instr) in stage.lists.iter().flatten().enumerate() {
        for b in instr.reads() {
            touched[b.0 as usize].last = Some(at);
        }
        for b in instr.writes() {
            let t = &mut touched[b.0 as usize];
            t.writes.push(at);
            t.born.get_or_insert(at);
            t.last = Some(at);
        }
        if let Some((from, to)) = instr.same_bytes(&stage.buffers) {
            candidates.push(Candidate { at, from: from.0 as usize, to: to.0 as usize });
        }
    }
    // States and constants are there from the start.
    for (t, lasting) in touched.iter_mut().zip(&stage.lasting) {
        if *lasting == Lasting::Persistent {
            t.born = None;
        }
    }
    (touched, candidates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use autoshard_ir::factor::ReduceKind;
    use autoshard_ir::{DType, Type};
    use autoshard_runtime::program::{Axis, Buffer, Instr, Region};

    /// Buffers of 4 elements, the first of them persistent; instructions by list.
    fn shared(buffers: u32, persistent: u32, lists: [Vec<Instr>; 4]) -> Vec<u32> {
        let buffer = |i| Buffer {
            name: format!("b{i}"),
            ty: Type::new(DType::F32, [4]),
            global: vec![4],
            shards: vec![vec![]],
            region: Region::Scratch,
            offset: 0,
        };
        let lasting = |i| if i < persistent { Lasting::Persistent } else { Lasting::ByUse };
        let stage = Stage {
            buffers: (0..buffers).map(buffer).collect(),
            lasting: (0..buffers).map(lasting).collect(),
            lists,
            states: Vec::new(),
            constants: Vec::new(),
        };
        storage(&stage).into_iter().map(|b| b.0).collect()
    }
    fn copy(from: u32, to: u32) -> Instr {
        Instr::Copy { input: BufferId(from), output: BufferId(to) }
    }
    fn feed(to: u32) -> Instr {
        Instr::Feed { port: 0, output: BufferId(to) }
    }
    fn fetch(from: u32) -> Instr {
        Instr::Fetch { port: 0, input: BufferId(from) }
    }
    fn reduce_in_place(b: u32) -> Instr {
        let b = BufferId(b);
        Instr::AllReduce { input: b, output: b, kind: ReduceKind::Sum, axes: vec![Axis(0)] }
    }
    fn accumulate(from: u32, to: u32) -> Instr {
        Instr::Accumulate { input: BufferId(from), output: BufferId(to) }
    }
    fn forward(list: Vec<Instr>) -> [Vec<Instr>; 4] {
        [vec![], list, vec![], vec![]]
    }

    #[test]
    fn a_chain_of_views_is_one_storage_across_lists() {
        let lists = [vec![], vec![feed(0), copy(0, 1)], vec![copy(1, 2), fetch(0), fetch(2)], vec![]];
        assert_eq!(shared(3, 0, lists), [0, 0, 0]);
    }

    #[test]
    fn what_is_reduced_in_place_while_a_view_is_needed_is_copied() {
        let operand = vec![feed(0), copy(0, 1), reduce_in_place(0), fetch(0), fetch(1)];
        assert_eq!(shared(2, 0, forward(operand)), [0, 1]);
        let result = vec![feed(0), copy(0, 1), reduce_in_place(1), fetch(0), fetch(1)];
        assert_eq!(shared(2, 0, forward(result)), [0, 1]);
    }

    #[test]
    fn what_is_reduced_in_place_when_nobody_needs_the_other_is_a_view() {
        assert_eq!(shared(2, 0, forward(vec![feed(0), copy(0, 1), reduce_in_place(1), fetch(1)])), [0, 0]);
        assert_eq!(shared(2, 0, forward(vec![feed(0), reduce_in_place(0), copy(0, 1), fetch(1)])), [0, 0]);
    }

    #[test]
    fn a_view_of_a_state_must_not_be_read_after_the_state_is_written() {
        let update = |list| [vec![], vec![copy(0, 1), fetch(1)], vec![], list];
        assert_eq!(shared(3, 1, update(vec![feed(2), copy(2, 0)])), [0, 0, 2]);
        assert_eq!(shared(3, 1, update(vec![feed(2), copy(2, 0), fetch(1)])), [0, 1, 2]);
    }

    #[test]
    fn a_state_is_never_written_through_a_view() {
        assert_eq!(shared(2, 1, forward(vec![copy(0, 1), reduce_in_place(1), fetch(1)])), [0, 1]);
    }

    #[test]
    fn a_sum_over_micro_batches_has_views_in_the_update_only() {
        let lists = [vec![], vec![], vec![feed(1), accumulate(1, 0)], vec![copy(0, 2), fetch(2)]];
        assert_eq!(shared(3, 1, lists), [0, 1, 0]);
        // The next micro-batch adds to the sum before this one's view is read.
        let lists = [vec![], vec![copy(0, 2)], vec![fetch(2), feed(1), accumulate(1, 0)], vec![]];
        assert_eq!(shared(3, 1, lists), [0, 1, 2]);
    }

    #[test]
    fn what_is_written_twice_is_no_view() {
        assert_eq!(shared(2, 0, forward(vec![feed(0), feed(1), copy(0, 1), fetch(1)])), [0, 1]);
    }
}
