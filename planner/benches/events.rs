//! How fast steps are played: schedules of pipelines, and the streams of a section.
//!
//! `cargo bench --workspace --bench events` prints events and seconds, the best of three. Results with commit and machine are kept in
//! `planner/benches/events.md`.

use std::time::Instant;

use autoshard_planner::assignment::Schedule;
use autoshard_planner::formulate::Pace;
use autoshard_planner::simulate::{Spent, StagePrediction};
use autoshard_planner::streams::{Section, Transfer};
use autoshard_planner::timeline::timeline;

fn main() {
    println!("| what | events | seconds |");
    println!("|---|---|---|");
    for (name, schedule, chunks, micro_batches) in [
        ("GPipe", Schedule::GPipe, 1, 8192),
        ("1F1B", Schedule::OneF1B, 1, 8192),
        ("interleaved, 8 chunks", Schedule::OneF1B, 8, 1024),
        ("zero bubble", Schedule::ZeroBubble, 1, 5461),
    ] {
        let stages = stages(64);
        let pace = Pace { micro_batches, schedule, chunks };
        line(&format!("{name}: 64 stages, {micro_batches} micro-batches"), || timeline(&stages, &pace).len());
    }
    let section = section(100_000);
    // An entry or a transfer each is an event.
    let events = section.compute.len() + section.transfers.len();
    line("a section of 100000 layers", || {
        std::hint::black_box(section.play());
        events
    });
}

fn line(name: &str, mut run: impl FnMut() -> usize) {
    let mut best = f64::INFINITY;
    let mut events = 0;
    for _ in 0..3 {
        let started = Instant::now();
        events = run();
        best = best.min(started.elapsed().as_secs_f64());
    }
    println!("| {name} | {events} | {best:.3} |");
}

/// Unequal stages, with sends.
fn stages(count: usize) -> Vec<StagePrediction> {
    let spent = |compute_s| Spent { compute_s, ..Spent::default() };
    let stage = |s: usize| StagePrediction {
        forward: spent(1.0 + 0.01 * (s % 7) as f64),
        backward: spent(2.0 + 0.02 * (s % 5) as f64),
        weights_s: 0.9,
        send_forward_s: 0.01,
        send_backward_s: 0.01,
        ..StagePrediction::default()
    };
    (0..count).map(stage).collect()
}

/// Layers of six operators, each with a gather, a reduction, and two collectives of another communicator that are waited for.
fn section(layers: usize) -> Section {
    let transfer = |communicator, seconds, from, awaited: Option<usize>| {
        let blocks = awaited == Some(from);
        Transfer { communicator, seconds, from, after: None, awaited, blocks }
    };
    let mut s = Section::default();
    for l in 0..layers {
        let at = 6 * l;
        s.compute.extend([1.0, 0.5, 2.0, 0.5, 1.0, 0.5]);
        s.transfers.push(transfer(1, 2.0, at.saturating_sub(6), Some(at)));
        s.transfers.push(transfer(1, 1.5, at + 6, None));
        s.transfers.push(transfer(2, 0.25, at + 2, Some(at + 2)));
        s.transfers.push(transfer(2, 0.25, at + 4, Some(at + 4)));
    }
    s
}
