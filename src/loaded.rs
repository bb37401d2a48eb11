//! A plan with its model: what every command after `plan` starts from.

use std::path::{Path, PathBuf};

use autoshard_ir::Graph;
use autoshard_ir::onnx::Model;
use autoshard_planner::assignment::Assignment;
use autoshard_planner::plan::{Plan, forward_graph};
use autoshard_planner::request::{RecomputeChoice, Workload};
use autoshard_runtime::program::Job;
use autoshard_runtime::session::SessionError;
use autoshard_runtime::verify::verify;

use crate::failure::Failure;
use crate::files;

/// A plan and its model.
pub struct Loaded {
    /// The plan.
    pub plan: Plan,
    /// Its model.
    pub model: Model,
}

/// Opens a model file.
pub fn model(path: &Path) -> Result<Model, Failure> {
    Model::open(path).map_err(Failure::new)
}

impl Loaded {
    /// Reads a plan and opens its model, which lies where the plan says, seen from here or from the plan: the first file
    /// there with the content that the plan was made for.
    pub fn open(path: &Path) -> Result<Loaded, Failure> {
        let text = files::read(path, "plan")?;
        let plan = Plan::from_json(&text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
        let given = PathBuf::from(&plan.model.path);
        let beside = path.parent().map(|d| d.join(&given));
        let by_name = given.file_name().and_then(|n| path.parent().map(|d| d.join(n)));
        let mut other = None;
        for file in [Some(given.clone()), beside, by_name].into_iter().flatten().filter(|p| p.exists()) {
            match model(&file) {
                Ok(model) if model.sha256() == plan.model.sha256 => return Ok(Loaded { model, plan }),
                found => _ = other.get_or_insert(found),
            }
        }
        // Of another content: `resolve` says so.
        if let Some(found) = other {
            return Ok(Loaded { model: found?, plan });
        }
        Err(Failure::new(format!("{}: its model {} is not there", path.display(), given.display()))
            .help("run from the folder in which the plan was made, or put the model beside the plan"))
    }

    /// The step graph and the decision for each node.
    pub fn resolve(&self) -> Result<(Graph, Assignment), Failure> {
        self.plan.resolve(&self.model).map_err(Failure::new)
    }
}

/// Compiles a decision, and verifies the programs.
pub fn compile(graph: &Graph, a: &Assignment) -> Result<Job, Failure> {
    let job =
        autoshard_codegen::compile(graph, a).map_err(|e| Failure::new(format!("the plan does not compile: {e}")))?;
    verify(&job).map_err(|found| Failure::new(SessionError::Invalid(found)))?;
    Ok(job)
}

/// Whether a step may be cut into micro-batches without changing its result, or what is in the way. Where there is no step
/// at all, nothing is.
pub fn micro_batchable(model: &Model, workload: &Workload) -> Result<(), String> {
    if model.batch_symbol().is_none() {
        return Err("the batch size is fixed in the model".into());
    }
    // A batch of one does not show which dims are the batch; not every model has a graph of every other batch.
    let graph = |batch| forward_graph(model, workload, batch);
    let Ok(graph) = graph(2).or_else(|_| graph(workload.global_batch)) else { return Ok(()) };
    let Ok(step) = workload.step(&graph, &[], 1, RecomputeChoice::None) else { return Ok(()) };
    autoshard_ir::train::micro_batchable(&step.graph).map_err(|reasons| {
        let more = if reasons.len() > 1 { format!("; and {} more", reasons.len() - 1) } else { String::new() };
        format!("{}{more}", reasons[0])
    })
}
