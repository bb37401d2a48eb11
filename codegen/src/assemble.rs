//! From the lists of a stage to a program: buffers get regions and offsets.
//!
//! - Buffers that share storage ([`crate::views`]) are placed as one, alive as long as any of them.
//! - What lasts for ever is `Persistent`, one after the other.
//! - With one micro-batch per step everything else shares one frame, laid out by lifetime over all four lists: gradients
//!   move into the memory of activations that are no longer needed.
//! - With several, what passes from the forward to the backward list is in the frame; the rest of the lists either shares
//!   the frame's free places (good when one frame is enough) or has scratch memory of its own: whichever is smaller.

use autoshard_runtime::program::{BufferId, Instr, List, Program, Region, Slot, place_bytes};

use crate::layout::{self, Lifetime};
use crate::partition::{Lasting, Stage};
use crate::views;

/// By buffer, the first and the last instruction that touch its storage, where one does.
type Spans = Vec<Option<(usize, usize)>>;

/// First write and last read of every storage, as instruction numbers of `lists` put one after the other.
fn lifetimes(stage: &Stage, storage: &[BufferId], lists: &[List]) -> Spans {
    let mut spans: Spans = vec![None; stage.buffers.len()];
    let instrs = lists.iter().flat_map(|l| &stage.lists[*l as usize]);
    for (at, instr) in instrs.enumerate() {
        for b in instr.reads().into_iter().chain(instr.writes()) {
            let span = spans[storage[b.0 as usize].0 as usize].get_or_insert((at, at));
            span.1 = at;
        }
    }
    spans
}

/// Renames the result of an all-reduce to its operand where nobody needs the operand any more.
fn in_place(stage: &mut Stage) {
    for list in 0..stage.lists.len() {
        let mut last = vec![0usize; stage.buffers.len()];
        let mut lists_of = vec![0u8; stage.buffers.len()];
        for (l, instrs) in stage.lists.iter().enumerate() {
            for (at, instr) in instrs.iter().enumerate() {
                for b in instr.reads().into_iter().chain(instr.writes()) {
                    lists_of[b.0 as usize] |= 1 << l;
                    if l == list {
                        last[b.0 as usize] = at;
                    }
                }
            }
        }
        let mut renamed: Vec<BufferId> = (0..stage.buffers.len() as u32).map(BufferId).collect();
        for (at, instr) in stage.lists[list].iter_mut().enumerate() {
            instr.map_buffers(|b| renamed[b.0 as usize]);
            if let Instr::AllReduce { input, output, .. } = instr {
                let i = input.0 as usize;
                let only_here = lists_of[i] == 1 << list;
                if only_here && last[i] == at && input != output && stage.lasting[i] == Lasting::ByUse {
                    // The operand lives on as the result.
                    last[i] = last[output.0 as usize];
                    lists_of[i] |= lists_of[output.0 as usize];
                    renamed[output.0 as usize] = *input;
                    *output = *input;
                }
            }
        }
        for (l, instrs) in stage.lists.iter_mut().enumerate() {
            if l != list {
                instrs.iter_mut().for_each(|i| i.map_buffers(|b| renamed[b.0 as usize]));
            }
        }
    }
}

/// Drops buffers that no instruction names any more, and numbers the others anew.
fn compact(stage: &mut Stage) {
    let mut used: Vec<bool> = stage.lasting.iter().map(|l| *l == Lasting::Persistent).collect();
    for b in stage.lists.iter().flatten().flat_map(|i| i.reads().into_iter().chain(i.writes())) {
        used[b.0 as usize] = true;
    }
    let mut number = 0;
    let renamed: Vec<BufferId> = used
        .iter()
        .map(|u| {
            let id = BufferId(number);
            number += u32::from(*u);
            id
        })
        .collect();
    let rename = |b: BufferId| renamed[b.0 as usize];
    stage.lists.iter_mut().flatten().for_each(|i| i.map_buffers(rename));
    stage.states.iter_mut().for_each(|s| s.buffer = rename(s.buffer));
    stage.constants.iter_mut().for_each(|c| c.0 = rename(c.0));
    let mut keep = used.iter();
    stage.buffers.retain(|_| *keep.next().expect("one flag per buffer"));
    let mut keep = used.iter();
    stage.lasting.retain(|_| *keep.next().expect("one flag per buffer"));
}

/// Where buffers lie; of buffers that share storage, one stands for all.
#[derive(Clone)]
struct Places {
    regions: Vec<Region>,
    offsets: Vec<u64>,
}

impl Places {
    /// Lays out the buffers of `which` that are alive in `spans`; returns the size.
    fn lay(&mut self, stage: &Stage, region: Region, spans: &Spans, which: impl Fn(usize) -> bool) -> u64 {
        let chosen: Vec<(usize, Lifetime)> = spans
            .iter()
            .enumerate()
            .filter(|(i, _)| stage.lasting[*i] != Lasting::Persistent && which(*i))
            .filter_map(|(i, span)| {
                let (birth, death) = (*span)?;
                Some((i, Lifetime { birth, death, bytes: stage.buffers[i].bytes() }))
            })
            .collect();
        let lives: Vec<Lifetime> = chosen.iter().map(|c| c.1).collect();
        let placed = layout::place(&lives);
        for ((i, _), at) in chosen.iter().zip(placed.offsets) {
            self.regions[*i] = region;
            self.offsets[*i] = at;
        }
        placed.total
    }
}

/// Gives every buffer its place.
pub fn program(mut stage: Stage, slots: Vec<Slot>, frames: usize, micro_batches: usize) -> Program {
    in_place(&mut stage);
    compact(&mut stage);
    let storage = views::storage(&stage);
    let n = stage.buffers.len();
    let mut places = Places { regions: vec![Region::Scratch; n], offsets: vec![0; n] };
    let mut persistent_bytes = 0u64;
    for i in (0..n).filter(|&i| stage.lasting[i] == Lasting::Persistent) {
        places.regions[i] = Region::Persistent;
        places.offsets[i] = persistent_bytes;
        persistent_bytes += place_bytes(stage.buffers[i].bytes());
    }
    let (frame_bytes, scratch_bytes, places) = if micro_batches == 1 {
        let frame = places.lay(&stage, Region::Frame, &lifetimes(&stage, &storage, &List::ALL), |_| true);
        (frame, 0, places)
    } else {
        let per_list = List::ALL.map(|l| lifetimes(&stage, &storage, &[l]));
        let [prologue, forward, backward, update] = &per_list;
        let joint = lifetimes(&stage, &storage, &[List::Forward, List::Backward]);
        let crosses = |i: usize| forward[i].is_some() && backward[i].is_some();
        let in_micro_batch = |i: usize| joint[i].is_some();
        // Scratch of its own for every list, the lists sharing one region.
        let mut apart = places.clone();
        let frame = apart.lay(&stage, Region::Frame, &joint, crosses);
        let of_lists = per_list.iter().map(|spans| apart.lay(&stage, Region::Scratch, spans, |i| !crosses(i)));
        let scratch = of_lists.max().unwrap_or(0);
        // Or all of a micro-batch in its frame.
        let mut within = places;
        let whole = within.lay(&stage, Region::Frame, &joint, in_micro_batch);
        let of_step = [prologue, update].map(|l| within.lay(&stage, Region::Scratch, l, |i| !in_micro_batch(i)));
        let rest = of_step[0].max(of_step[1]);
        let frames = frames as u64;
        if whole * frames + rest < frame * frames + scratch { (whole, rest, within) } else { (frame, scratch, apart) }
    };
    for (b, place) in stage.buffers.iter_mut().zip(&storage) {
        b.region = places.regions[place.0 as usize];
        b.offset = places.offsets[place.0 as usize];
    }
    let [prologue, forward, backward, update] = stage.lists;
    Program {
        buffers: stage.buffers,
        forward,
        backward,
        prologue,
        update,
        schedule: slots,
        states: stage.states,
        constants: stage.constants,
        persistent_bytes,
        frame_bytes,
        frames,
        scratch_bytes,
    }
}
