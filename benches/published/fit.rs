//! Fits the few coefficients of the compute model, by architecture, so that predicted step times are near the measured ones.
//!
//! Choices stay as they were planned; only times are predicted anew. What is minimised is the mean, over sources, of the mean
//! absolute logarithm of predicted over measured: no source outweighs the others by its number of rows.

use std::collections::BTreeMap;

use autoshard_cost_models::compute::Coefficients;
use autoshard_cost_models::hardware::Architecture;
use autoshard_planner::simulate::simulate;
use autoshard_planner::times::Times;

use crate::Planned;

/// A coefficient, and the values that are physically possible.
type Knob = (&'static str, fn(&mut Coefficients) -> &mut f64, f64, f64);

const KNOBS: &[Knob] = &[
    ("sustained", |c| &mut c.sustained, 0.5, 1.1),
    ("attention", |c| &mut c.attention, 0.1, 0.8),
    ("stream", |c| &mut c.stream, 0.3, 0.95),
    ("launch_us", |c| &mut c.launch_us, 2.0, 10.0),
];

/// Seconds of a step with other coefficients.
pub fn step_time(p: &Planned, c: &Coefficients) -> f64 {
    let mut cluster = p.cluster.clone();
    cluster.device.compute = Some(c.clone());
    let times = Times::new(&cluster, &p.assignment.mesh);
    let mut times = times.executing(p.execution);
    simulate(&p.step.graph, &p.step.blocks, &p.assignment, &mut times).step_time_s
}

/// Rows of a source that are fitted to, at most, evenly taken: more of the same kind only take time.
const ROWS: usize = 12;

fn sample<'a>(cases: &[&'a Planned]) -> Vec<&'a Planned> {
    let mut by_source: BTreeMap<&str, Vec<&Planned>> = BTreeMap::new();
    cases.iter().for_each(|p| by_source.entry(&p.case.source).or_default().push(p));
    by_source
        .into_values()
        .flat_map(|v| {
            let every = v.len().div_ceil(ROWS);
            v.into_iter().step_by(every)
        })
        .collect()
}

fn loss(cases: &[&Planned], c: &Coefficients) -> f64 {
    let mut by_source: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for p in cases {
        if let Some(measured) = p.case.measured.step_s {
            by_source.entry(&p.case.source).or_default().push((step_time(p, c) / measured).ln().abs());
        }
    }
    let means = by_source.values().map(|v| v.iter().sum::<f64>() / v.len() as f64);
    means.sum::<f64>() / by_source.len().max(1) as f64
}

/// The best coefficients for the cases of one architecture, by coordinate search.
pub fn fit(cases: &[&Planned], start: &Coefficients) -> (Coefficients, f64) {
    let cases = &sample(cases)[..];
    let mut best = start.clone();
    let mut least = loss(cases, &best);
    for step in [1.12, 1.03] {
        let mut moved = true;
        while moved {
            moved = false;
            for (_, knob, low, high) in KNOBS {
                for factor in [step, 1.0 / step] {
                    loop {
                        let mut tried = best.clone();
                        let value = knob(&mut tried);
                        *value = (*value * factor).clamp(*low, *high);
                        let found = loss(cases, &tried);
                        if found >= least * (1.0 - 1e-4) {
                            break;
                        }
                        (best, least, moved) = (tried, found, true);
                    }
                }
            }
        }
    }
    (best, least)
}

/// As lines of `coefficients/compute.toml`.
pub fn show(architecture: Architecture, c: &Coefficients) -> String {
    let mut c = c.clone();
    let lines: Vec<String> = KNOBS.iter().map(|(name, knob, ..)| format!("{name} = {:.3}", *knob(&mut c))).collect();
    format!("[architecture.{architecture:?}] {}", lines.join(", "))
}
