//! From the lists of a stage to a program: buffers get regions and offsets.
//!
//! - Buffers that share storage ([`crate::views`]) are placed as one, alive as long as any of them.
//! - What lasts for ever is `Persistent`, one after the other.
//! - With one micro-batch per step everything else shares one frame, laid out by lifetime over all four lists: gradients
//!   move into the memory of activations that are no longer needed.
//! - With several, what passes from the forward to the backward list is in the frame; the rest of the lists either shares
//!   the frame's free places (good when one frame is enough) or has scratch memory of its own: whichever is smaller.

use autoshard_runtime::program::{BufferId, Instr, List, Program, Region, Slot};

use crate::layout::{self, Lifetime};
use crate::partition::{Lasting, Stage};
use crate::views;

/// First write and last read of every storage, as instruction numbers of `lists` put one after the other.
fn lifetimes(stage: &Stage, storage: &[BufferId], lists: &[List]) -> Vec<Option<(usize, usize)>> {
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; stage.buffers.len()];
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

/// Gives every buffer its place.
pub fn program(mut stage: Stage, slots: Vec<Slot>, frames: usize, micro_batches: usize) -> Program {
    in_place(&mut stage);
    compact(&mut stage);
    let storage = views::storage(&stage);
    let n = stage.buffers.len();
    let mut regions = vec![Region::Scratch; n];
    let mut offsets = vec![0u64; n];
    let bytes: Vec<u64> = stage.buffers.iter().map(|b| b.ty.bytes() as u64).collect();
    let persistent: Vec<bool> = stage.lasting.iter().map(|l| *l == Lasting::Persistent).collect();

    let mut persistent_bytes = 0u64;
    for i in (0..n).filter(|&i| persistent[i]) {
        regions[i] = Region::Persistent;
        offsets[i] = persistent_bytes;
        persistent_bytes += bytes[i].max(1).next_multiple_of(autoshard_ir::tensor::ALIGN as u64);
    }
    // Lays out some buffers by their lifetime over some lists; returns the size.
    let mut lay =
        |which: &dyn Fn(usize) -> bool, spans: &[Option<(usize, usize)>], region: Region, offsets: &mut [u64]| {
            let chosen: Vec<usize> = (0..n).filter(|&i| !persistent[i] && which(i) && spans[i].is_some()).collect();
            let lives: Vec<Lifetime> = chosen
                .iter()
                .map(|&i| {
                    let (birth, death) = spans[i].expect("filtered");
                    Lifetime { birth, death, bytes: bytes[i] }
                })
                .collect();
            let placed = layout::place(&lives);
            for (&i, at) in chosen.iter().zip(placed.offsets) {
                regions[i] = region;
                offsets[i] = at;
            }
            placed.total
        };
    let (frame_bytes, scratch_bytes, offsets) = if micro_batches == 1 {
        let spans = lifetimes(&stage, &storage, &List::ALL);
        let frame = lay(&|_| true, &spans, Region::Frame, &mut offsets);
        (frame, 0, offsets)
    } else {
        let per_list: Vec<_> = List::ALL.iter().map(|l| lifetimes(&stage, &storage, &[*l])).collect();
        let joint = lifetimes(&stage, &storage, &[List::Forward, List::Backward]);
        let crosses = |i: usize| per_list[1][i].is_some() && per_list[2][i].is_some();
        let in_micro_batch = |i: usize| joint[i].is_some();
        // Scratch of its own for every list, the lists sharing one region.
        let mut apart = offsets.clone();
        let frame = lay(&crosses, &joint, Region::Frame, &mut apart);
        let mut scratch = 0;
        for spans in &per_list {
            scratch = scratch.max(lay(&|i| !crosses(i), spans, Region::Scratch, &mut apart));
        }
        // Or all of a micro-batch in its frame.
        let mut within = offsets;
        let whole = lay(&in_micro_batch, &joint, Region::Frame, &mut within);
        let rest = lay(&|i| !in_micro_batch(i), &per_list[0], Region::Scratch, &mut within).max(lay(
            &|i| !in_micro_batch(i),
            &per_list[3],
            Region::Scratch,
            &mut within,
        ));
        let frames = frames as u64;
        if whole * frames + rest < frame * frames + scratch {
            (whole, rest, within)
        } else {
            lay(&crosses, &joint, Region::Frame, &mut apart);
            for spans in &per_list {
                lay(&|i| !crosses(i), spans, Region::Scratch, &mut apart);
            }
            (frame, scratch, apart)
        }
    };
    for (b, place) in stage.buffers.iter_mut().zip(&storage) {
        b.region = regions[place.0 as usize];
        b.offset = offsets[place.0 as usize];
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
