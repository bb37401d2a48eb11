//! Measuring this machine: what `autoshard profile` does.
//!
//! What `run` would execute is timed: operators ([`operators`], [`bench`]) and collectives ([`collectives`]), with as many ranks at
//! once as there are cores. The coefficients of the cost model are fitted to it ([`fit`]), and written as a cluster file
//! ([`cluster`]). Figures hold for the build that measured them: `run` of a debug build is slower.

pub mod bench;
pub mod cluster;
pub mod collectives;
pub mod fit;
pub mod host;
pub mod operators;

use std::collections::BTreeMap;

use autoshard_cost_models::CollectiveKind;
use autoshard_ir::op::SampleInput;
use autoshard_ir::{DType, Op, Type, ops};

use bench::{Case, Timed};
use collectives::Line;
use host::Host;
use operators::Costs;

/// Copying memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Copying {
    /// Bytes read and written per second.
    pub bandwidth: f64,
    /// A copy of next to nothing, seconds.
    pub call_s: f64,
}

/// What was measured.
pub struct Profile {
    /// Of the cluster.
    pub name: String,
    /// The machine.
    pub host: Host,
    /// When.
    pub date: String,
    /// Ranks at once.
    pub ranks: usize,
    /// Operators.
    pub costs: Costs,
    /// Copies.
    pub copy: Copying,
    /// Bytes of 16-bit floats that kernels convert, 1e9 per second.
    pub half_gb_s: Option<f64>,
    /// Collectives; none on one rank.
    pub collectives: BTreeMap<CollectiveKind, Line>,
    /// Cases of operators.
    pub cases: usize,
    /// Samples of each.
    pub samples: usize,
}

impl Profile {
    /// Bytes gathered, 1e9 per second.
    pub fn gather(&self) -> Option<f64> {
        self.costs.operators.get("Gather").and_then(|c| c.gb_s)
    }
}

/// An addition of two tensors of so many elements.
fn addition(dtype: DType, elements: usize) -> Option<Case> {
    let x = || SampleInput { ty: Type::new(dtype, [elements]), range: (-1.0, 1.0) };
    Case::whole(Op::new(ops::find("Add")?), vec![x(), x()])
}

/// A copy of so many elements: two tensors into one.
fn copy(elements: usize) -> Option<Case> {
    let op = Op::new(ops::find("Concat")?).int("dim", 0);
    let x = || SampleInput::f32([elements / 2]);
    Case::whole(op, vec![x(), x()])
}

/// Steps of [`measure`], for a progress bar.
pub fn steps(cases: &[Case], ranks: usize) -> usize {
    cases.len() * bench::PASSES + collectives::count(ranks)
}

/// Every case of operators: those of [`operators::cases`], and at the end what [`measure`] needs besides.
pub fn cases() -> Vec<Case> {
    let mut all = operators::cases();
    all.extend(extra().into_iter().flatten());
    all
}

/// Copies small and large, additions of f32 and bf16.
fn extra() -> [Option<Case>; 4] {
    [copy(256), copy(1 << 18), addition(DType::F32, 1 << 15), addition(DType::Bf16, 1 << 15)]
}

/// Measures everything.
pub fn measure(
    name: String,
    host: Host,
    ranks: usize,
    cases: &[Case],
    done: &(dyn Fn() + Sync),
) -> Result<Profile, String> {
    let timed = bench::time(cases, ranks, done);
    let own = cases.len() - extra().iter().flatten().count();
    let costs = operators::costs(&cases[..own], &timed[..own])?;
    let [small, large, single, half] = &timed[own..] else {
        return Err("the table of operators has no Concat or Add".into());
    };
    let seconds = |t: &Result<Timed, String>| t.as_ref().map(|t| t.seconds).map_err(String::clone);
    let bytes = |i: usize| cases[own + i].work().bytes;
    let call_s = seconds(small)?;
    let copy = Copying { bandwidth: bytes(1) / (seconds(large)? - call_s).max(1e-9), call_s };
    // What 16-bit floats take more than 32-bit ones.
    let more = seconds(half)? - seconds(single)?;
    let half_gb_s = (more > 0.0).then(|| bytes(3) / more * 1e-9);
    let samples = timed.iter().flatten().map(|t| t.samples).max().unwrap_or(0);
    let collectives = collectives::time(ranks, done)?;
    let date = host::today();
    Ok(Profile { name, host, date, ranks, costs, copy, half_gb_s, collectives, cases: own, samples })
}
