//! The schedule of a step, played: which stage runs which micro-batch when.
//!
//! Stages run their forwards and backwards in a fixed order, one at a time, each when what it reads has arrived.

use serde::Serialize;

use crate::assignment::Schedule;
use crate::formulate::Pace;
use crate::simulate::StagePrediction;

/// Something that a stage does, for pictures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Event {
    /// Which stage.
    pub stage: usize,
    /// `forward`, `backward`, `weights` (gradients by weights, where the schedule has passes of their own for them) or `update`.
    pub kind: &'static str,
    /// For which micro-batch; 0 in the update.
    pub micro_batch: usize,
    /// Seconds from the start of the step.
    pub start_s: f64,
    /// Seconds from the start of the step.
    pub end_s: f64,
}

/// What stages do in a step, as [`crate::simulate`] plays it.
pub fn timeline(stages: &[StagePrediction], pace: &Pace) -> Vec<Event> {
    let played = play(stages, pace);
    let mut events = played.events;
    for (stage, s) in stages.iter().enumerate() {
        if s.update.total() > 0.0 {
            let (start_s, end_s) = (played.end, played.end + s.update.total());
            events.push(Event { stage, kind: "update", micro_batch: 0, start_s, end_s });
        }
    }
    events.retain(|e| e.end_s > e.start_s);
    events
}

/// The forwards and backwards of a step, played.
pub(crate) struct Played {
    /// In the order in which they were found to be possible.
    pub(crate) events: Vec<Event>,
    /// When the last one ends.
    pub(crate) end: f64,
    /// Seconds that each stage is busy.
    pub(crate) busy: Vec<f64>,
}

/// One entry of a stage's order: of a chunk and a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    Forward(usize, usize),
    Backward(usize, usize),
    /// Gradients by weights.
    Weights(usize, usize),
}

/// In which order a stage runs forwards and backwards. Interleaved: chunks take turns for `stages` micro-batches each
/// (Narayanan et al. 2021, section 2.2). Zero bubble: a stage is as many gradients by weights behind as there are stages before it, and
/// runs them where it would wait for the last backwards (ZB-H1: Qi et al. 2024, figure 3).
fn order(stage: usize, stages: usize, pace: &Pace, trains: bool) -> Vec<Run> {
    let (m, v) = (pace.micro_batches, pace.chunks);
    let group = if v > 1 { stages } else { m };
    // (chunk, micro-batch) of the forwards; backwards take chunks from the last.
    let mut turns = Vec::with_capacity(m * v);
    for first in (0..m).step_by(group.max(1)) {
        for chunk in 0..v {
            turns.extend((first..m.min(first + group)).map(|micro| (chunk, micro)));
        }
    }
    let forward = |i: usize| Run::Forward(turns[i].0, turns[i].1);
    if !trains {
        return (0..turns.len()).map(forward).collect();
    }
    let backward = |i: usize| Run::Backward(v - 1 - turns[i].0, turns[i].1);
    let ahead = pace.ahead(stage, stages);
    let weights = |i: usize| Run::Weights(v - 1 - turns[i].0, turns[i].1);
    let (apart, behind) = (pace.schedule == Schedule::ZeroBubble, pace.weights_behind(stage).min(turns.len()));
    let mut list: Vec<Run> = (0..ahead).map(forward).collect();
    for i in 0..turns.len() {
        list.push(backward(i));
        if apart && i >= behind {
            list.push(weights(i - behind));
        }
        if ahead + i < turns.len() {
            list.push(forward(ahead + i));
        }
    }
    if apart {
        list.extend((turns.len() - behind..turns.len()).map(weights));
    }
    list
}

/// Plays a step: a stage takes its next entry as soon as what that reads has arrived. Chunks of a stage take equal parts.
pub(crate) fn play(stages: &[StagePrediction], pace: &Pace) -> Played {
    let (p, v, m) = (stages.len(), pace.chunks, pace.micro_batches);
    let trains = stages.iter().any(|s| s.backward.total() > 0.0);
    let orders: Vec<Vec<Run>> = (0..p).map(|s| order(s, p, pace, trains)).collect();
    let forward: Vec<f64> = stages.iter().map(|s| s.forward.total() / v as f64).collect();
    // Where they have passes of their own, gradients by weights are no part of the backward.
    let weights: Vec<f64> = stages.iter().map(|s| s.weights_s / v as f64).collect();
    let backward: Vec<f64> = stages.iter().map(|s| (s.backward.total() - s.weights_s) / v as f64).collect();
    // From the last stage to the first one's next chunk, as much as between any two.
    let longest = |send: fn(&StagePrediction) -> f64| stages.iter().map(send).fold(0.0, f64::max);
    let (around_forward, around_backward) = (longest(|s| s.send_forward_s), longest(|s| s.send_backward_s));
    // When forward and backward of (position, micro-batch) end; positions are chunks in the order of the model.
    let none = f64::NAN;
    let mut ended = vec![[vec![none; m], vec![none; m]]; p * v];
    let mut next = vec![0; p];
    let mut clock = vec![0.0; p];
    let mut events = Vec::new();
    loop {
        let mut moved = false;
        for s in 0..p {
            while let Some(run) = orders[s].get(next[s]) {
                let (at, way, micro) = match *run {
                    Run::Forward(chunk, micro) => (chunk * p + s, 0, micro),
                    Run::Backward(chunk, micro) => (chunk * p + s, 1, micro),
                    Run::Weights(chunk, micro) => (chunk * p + s, 2, micro),
                };
                let (ready, time) = match way {
                    0 if at == 0 => (0.0, forward[s]),
                    0 => {
                        let send = if s == 0 { around_forward } else { stages[s - 1].send_forward_s };
                        (ended[at - 1][0][micro] + send, forward[s])
                    }
                    2 => (ended[at][1][micro], weights[s]),
                    _ if at + 1 == p * v => (ended[at][0][micro], backward[s]),
                    _ => {
                        let send = if s + 1 == p { around_backward } else { stages[s + 1].send_backward_s };
                        (ended[at + 1][1][micro] + send, backward[s])
                    }
                };
                if ready.is_nan() {
                    break;
                }
                let start_s = f64::max(clock[s], ready);
                clock[s] = start_s + time;
                let kind = ["forward", "backward", "weights"][way];
                events.push(Event { stage: s, kind, micro_batch: micro, start_s, end_s: clock[s] });
                // Nothing else waits for gradients by weights.
                if way < 2 {
                    ended[at][way][micro] = clock[s];
                }
                next[s] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    Played {
        events,
        end: clock.into_iter().fold(0.0, f64::max),
        busy: (0..p).map(|s| (m * v) as f64 * (forward[s] + backward[s] + weights[s])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::Spent;

    fn uniform(p: usize, m: usize, chunks: usize, schedule: Schedule) -> Played {
        let spent = |compute_s| Spent { compute_s, ..Default::default() };
        let one = StagePrediction { forward: spent(1.0), backward: spent(2.0), ..Default::default() };
        play(&vec![one; p], &Pace { micro_batches: m, schedule, chunks })
    }

    /// Both schedules take `(m + p - 1)` times forward and backward when stages are equal and sends are free.
    #[test]
    fn equal_stages_have_the_known_bubble() {
        for (p, m) in [(1, 1), (1, 4), (2, 4), (4, 4), (4, 16), (3, 2), (8, 1)] {
            for schedule in [Schedule::GPipe, Schedule::OneF1B] {
                assert_eq!(uniform(p, m, 1, schedule).end, 3.0 * (m + p - 1) as f64, "p={p} m={m} {schedule:?}");
            }
        }
    }

    /// Interleaving divides the bubble by the chunks (Narayanan et al. 2021, section 2.2.2).
    #[test]
    fn interleaving_divides_the_bubble() {
        for (p, m, v) in [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 64, 3)] {
            let expected = 3.0 * (m as f64 + (p - 1) as f64 / v as f64);
            let found = uniform(p, m, v, Schedule::OneF1B).end;
            assert!((found - expected).abs() < 1e-9, "p={p} m={m} v={v}: {found}, not {expected}");
        }
    }

    #[test]
    fn every_stage_runs_every_micro_batch_of_every_chunk_once() {
        for (schedule, chunks, m) in
            [(Schedule::GPipe, 1, 6), (Schedule::OneF1B, 1, 6), (Schedule::OneF1B, 3, 8), (Schedule::OneF1B, 2, 7)]
        {
            for s in 0..4 {
                let mut list = order(s, 4, &Pace { micro_batches: m, schedule, chunks }, true);
                list.sort_by_key(|r| match *r {
                    Run::Forward(c, m) => (0, c, m),
                    Run::Backward(c, m) => (1, c, m),
                    Run::Weights(c, m) => (2, c, m),
                });
                let all = |run: fn(usize, usize) -> Run| (0..chunks).flat_map(move |c| (0..m).map(move |m| run(c, m)));
                assert_eq!(list, all(Run::Forward).chain(all(Run::Backward)).collect::<Vec<_>>());
            }
            // None waits for ever.
            assert_eq!(uniform(4, m, chunks, schedule).events.len(), 4 * 2 * chunks * m);
        }
    }

    /// Forward, backward by activations and by weights, one after the other.
    fn apart(p: usize, m: usize, [f, b, w]: [f64; 3]) -> Played {
        let spent = |compute_s| Spent { compute_s, ..Default::default() };
        let one = StagePrediction { forward: spent(f), backward: spent(b + w), weights_s: w, ..Default::default() };
        play(&vec![one; p], &Pace { micro_batches: m, schedule: Schedule::ZeroBubble, chunks: 1 })
    }

    /// Qi et al. 2024, table 2: where gradients by weights take no longer than by activations, all but
    /// `(p - 1) (T_F + T_B - T_W)` is filled; 1F1B leaves `(p - 1) (T_F + T_B + T_W)`.
    #[test]
    fn zero_bubble_has_the_bubble_of_the_paper() {
        for times @ [f, b, w] in [[1.0, 1.0, 1.0], [1.0, 1.25, 0.75], [2.0, 2.0, 1.0], [1.0, 1.5, 1.0]] {
            for (p, m) in [(1, 3), (2, 4), (4, 4), (4, 8), (4, 16), (8, 16), (8, 64)] {
                let expected = m as f64 * (f + b + w) + (p - 1) as f64 * (f + b - w);
                let found = apart(p, m, times).end;
                assert!((found - expected).abs() < 1e-9, "p={p} m={m} {times:?}: {found}, not {expected}");
            }
        }
    }

    /// All stages have as many micro-batches between forward and gradients by weights as the first one of 1F1B.
    #[test]
    fn zero_bubble_keeps_what_1f1b_keeps() {
        let (p, m) = (4, 12);
        for s in 0..p {
            let pace = Pace { micro_batches: m, schedule: Schedule::ZeroBubble, chunks: 1 };
            let list = order(s, p, &pace, true);
            assert_eq!(list.len(), 3 * m);
            let (mut now, mut most, mut between, mut most_between) = (0, 0, 0, 0);
            for run in list {
                match run {
                    Run::Forward(..) => now += 1,
                    Run::Backward(..) => between += 1,
                    Run::Weights(..) => (now, between) = (now - 1, between - 1),
                }
                (most, most_between) = (most.max(now), most_between.max(between));
            }
            assert_eq!((most, most_between), (p, 1 + pace.weights_behind(s)), "stage {s}");
            assert_eq!(most, pace.in_flight(s, p) + pace.weights_behind(s));
        }
        assert_eq!(apart(4, 12, [1.0; 3]).events.len(), 4 * 3 * 12);
    }

    #[test]
    fn inference_does_not_wait_for_backwards() {
        let forward = Spent { compute_s: 1.0, ..Default::default() };
        let one = StagePrediction { forward, ..Default::default() };
        let pace = Pace { micro_batches: 4, schedule: Schedule::OneF1B, chunks: 1 };
        assert_eq!(play(&vec![one; 3], &pace).end, 6.0);
    }
}
