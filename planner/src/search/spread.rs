//! A bound from the work on a micro-batch alone, communication included.
//!
//! Where an operator keeps samples apart, `dp` splits the batch and nothing else, so what ranks of one `cp` x `tp` group do for their `b`
//! samples of a micro-batch does not depend on how many such groups or stages there are. It is solved once per (`b`, `cp`, `tp`), without regard to memory, on a
//! mesh of two groups, where the batch is still a dim: the operators that have it once and keep it in every result, and
//! what passes between those. All else (sums over the batch, weights, their gradients, the update) may be spread over any number of ranks, and counts with the least time of each operator alone.

use std::rc::Rc;

use autoshard_ir::factor::FactorId;
use autoshard_ir::graph::Section;

use super::{Search, SearchError};
use crate::assignment::Schedule;
use crate::formulate::{Formulation, Pace, Step};
use crate::mesh::{AxisName, Mesh};
use crate::request::{RecomputeChoice, StepGraph};
use crate::roles::Tag;
use crate::solver::solve;
use crate::space::Space;

/// What ranks do at least for their samples of a micro-batch.
pub(super) struct Spread {
    /// Seconds.
    pub seconds: f64,
    /// Which classes this counts.
    pub counts: Vec<bool>,
    /// Their operators, by which those of a step of another batch are known to be the same classes.
    operators: Vec<&'static str>,
}

fn operators(step: &StepGraph) -> Vec<&'static str> {
    step.blocks.nodes.iter().map(|members| step.graph.node(members[0]).op.name()).collect()
}

impl Spread {
    /// Whether the classes of a step are those counted here.
    pub fn fits(&self, step: &StepGraph) -> bool {
        self.operators == operators(step)
    }
}

impl Search<'_> {
    /// For `samples` of a micro-batch per group of `cp` x `tp` ranks; none where no bound is to be had, or none better than that
    /// of operators alone.
    pub(super) fn spread(&mut self, samples: usize, mesh: &Mesh) -> Result<Option<Rc<Spread>>, SearchError> {
        let (cp, tp) = (mesh.along(AxisName::Cp), mesh.along(AxisName::Tp));
        // Experts differ along `ep`: what a rank does for its samples depends on it.
        if cp * tp == 1 || mesh.find(AxisName::Ep).is_some() {
            return Ok(None);
        }
        if let Some(known) = self.spreads.get(&(samples, cp, tp)) {
            return Ok(known.clone());
        }
        let found = match self.whole(2 * samples, RecomputeChoice::None) {
            Ok(step) => self.solve_spread(&step, cp, tp),
            // There may be no graph of that batch, though there is one of the candidate's.
            Err(SearchError::Graph(_)) => None,
            Err(e) => return Err(e),
        };
        let found = found.map(Rc::new);
        self.spreads.insert((samples, cp, tp), found.clone());
        Ok(found)
    }

    fn solve_spread(&self, step: &StepGraph, cp: usize, tp: usize) -> Option<Spread> {
        let mesh = Mesh::new([(AxisName::Dp, 2), (AxisName::Cp, cp), (AxisName::Tp, tp)]);
        let space = Space::new(step, &mesh, &self.request.constraints).ok()?;
        let batched = |(members, tags): (&Vec<autoshard_ir::NodeId>, &Vec<Option<Tag>>)| {
            let n = step.graph.node(members[0]);
            let rule = n.op.factors(&step.graph.input_types(n), &step.graph.output_types(n));
            let mut batch = (0..tags.len()).filter(|f| tags[*f] == Some(Tag::Batch));
            let (Some(f), None) = (batch.next(), batch.next()) else { return false };
            let kept = rule.outputs.iter().all(|dims| dims.contains(&Some(FactorId(f as u8))));
            n.section != Section::Update && kept
        };
        let counts: Vec<bool> = step.blocks.nodes.iter().zip(&step.tags).map(batched).collect();
        let pace = Pace { micro_batches: 1, schedule: Schedule::OneF1B, chunks: 1 };
        let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace };
        let mut times = self.times(&mesh);
        let problem = Formulation::part(&view, &space, &mut times, &counts).problem;
        let solution = solve(&problem, &self.options(self.share())).ok()?;
        Some(Spread { seconds: problem.value(solution.bound), counts, operators: operators(step) })
    }
}
