//! The order in which a stage runs forwards and backwards.
//!
//! GPipe runs all forwards, then all backwards, and keeps every micro-batch in flight. 1F1B (PipeDream-flush) keeps at
//! most `stages - stage`. A frame holds one micro-batch in flight; it is free again after its backward.

use autoshard_planner::assignment::Schedule;
use autoshard_runtime::program::Slot;

/// The schedule of one stage, and the number of frames it needs. Without `backward` (inference) a frame is free right
/// after its forward. Ends with `Slot::Update`.
pub fn slots(
    schedule: Schedule,
    stage: usize,
    stages: usize,
    micro_batches: usize,
    backward: bool,
) -> (Vec<Slot>, usize) {
    let mut slots = Vec::new();
    if !backward {
        slots.extend((0..micro_batches).map(|micro_batch| Slot::Forward { micro_batch, frame: 0 }));
        slots.push(Slot::Update);
        return (slots, 1);
    }
    let frames = in_flight(schedule, stage, stages, micro_batches);
    let warm_up = frames - 1;
    let forward = |micro_batch| Slot::Forward { micro_batch, frame: micro_batch % frames };
    let back = |micro_batch| Slot::Backward { micro_batch, frame: micro_batch % frames };
    slots.extend((0..warm_up).map(forward));
    for m in 0..micro_batches - warm_up {
        slots.push(forward(warm_up + m));
        slots.push(back(m));
    }
    slots.extend((micro_batches - warm_up..micro_batches).map(back));
    slots.push(Slot::Update);
    (slots, frames)
}

/// Micro-batches that a stage keeps between their forward and their backward, at most.
pub fn in_flight(schedule: Schedule, stage: usize, stages: usize, micro_batches: usize) -> usize {
    match schedule {
        Schedule::GPipe => micro_batches,
        // With one stage there is nothing to fill: zero bubble is 1F1B. With more it is not compiled.
        Schedule::OneF1B | Schedule::ZeroBubble => micro_batches.min(stages - stage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(schedule: Schedule, stage: usize, stages: usize, m: usize) -> String {
        let (slots, frames) = slots(schedule, stage, stages, m, true);
        let words: Vec<String> = slots
            .iter()
            .map(|s| match s {
                Slot::Forward { micro_batch, frame } => format!("F{micro_batch}@{frame}"),
                Slot::Backward { micro_batch, frame } => format!("B{micro_batch}@{frame}"),
                Slot::Update => "U".into(),
            })
            .collect();
        format!("{} ({frames})", words.join(" "))
    }

    #[test]
    fn one_f_one_b_keeps_at_most_the_stages_behind() {
        assert_eq!(text(Schedule::OneF1B, 0, 3, 4), "F0@0 F1@1 F2@2 B0@0 F3@0 B1@1 B2@2 B3@0 U (3)");
        assert_eq!(text(Schedule::OneF1B, 2, 3, 4), "F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 F3@0 B3@0 U (1)");
        assert_eq!(text(Schedule::OneF1B, 0, 4, 2), "F0@0 F1@1 B0@0 B1@1 U (2)");
    }

    #[test]
    fn gpipe_keeps_all() {
        assert_eq!(text(Schedule::GPipe, 1, 2, 3), "F0@0 F1@1 F2@2 B0@0 B1@1 B2@2 U (3)");
    }
}
