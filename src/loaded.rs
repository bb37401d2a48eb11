//! A plan with its model: what every command after `plan` starts from.

use std::path::{Path, PathBuf};

use autoshard_ir::Graph;
use autoshard_ir::onnx::Model;
use autoshard_planner::assignment::Assignment;
use autoshard_planner::plan::Plan;
use autoshard_runtime::program::Job;

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
    /// Reads a plan and opens its model, which lies where the plan says, seen from here or from the plan.
    pub fn open(path: &Path) -> Result<Loaded, Failure> {
        let text = files::read(path, "plan")?;
        let plan = Plan::from_json(&text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
        let given = PathBuf::from(&plan.model.path);
        let beside = path.parent().map(|d| d.join(&given));
        let by_name = given.file_name().and_then(|n| path.parent().map(|d| d.join(n)));
        let found = [Some(given.clone()), beside, by_name].into_iter().flatten().find(|p| p.exists());
        let Some(found) = found else {
            return Err(Failure::new(format!("{}: its model {} is not there", path.display(), given.display()))
                .help("run from the folder in which the plan was made, or put the model beside the plan"));
        };
        Ok(Loaded { model: model(&found)?, plan })
    }

    /// The step graph and the decision for each node.
    pub fn resolve(&self) -> Result<(Graph, Assignment), Failure> {
        self.plan.resolve(&self.model).map_err(Failure::new)
    }
}

/// Compiles a decision.
pub fn compile(graph: &Graph, a: &Assignment) -> Result<Job, Failure> {
    autoshard_codegen::compile(graph, a).map_err(|e| Failure::new(format!("the plan does not compile: {e}")))
}
