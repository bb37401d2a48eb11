//! Prints the programs of a plan: `cargo run --example program -- PLAN.json`. Run where the plan was made, so that its model is
//! found. Says on stderr what each stage's instructions write, by operator, and how much of it are views.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use autoshard_ir::onnx::Model;
use autoshard_planner::plan::Plan;
use autoshard_runtime::program::List;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("which plan? give its file")?;
    let plan = Plan::from_json(&std::fs::read_to_string(path)?)?;
    let model = Model::open(Path::new(&plan.model.path))?;
    let (graph, assignment) = plan.resolve(&model)?;
    let job = autoshard_codegen::compile(&graph, &assignment)?;
    print!("{job}");
    for (s, p) in job.stages.iter().enumerate() {
        let mut written: BTreeMap<(&str, bool), (usize, u64)> = BTreeMap::new();
        for instr in List::ALL.iter().flat_map(|l| p.list(*l)) {
            let bytes: u64 = instr.writes().iter().map(|b| p.buffer(*b).bytes()).sum();
            let of = written.entry((instr.mnemonic(), p.view(instr).is_some())).or_default();
            *of = (of.0 + 1, of.1 + bytes);
        }
        for ((name, view), (count, bytes)) in written {
            eprintln!("stage {s}: {count} {name}{} of {bytes} bytes", if view { " (views)" } else { "" });
        }
    }
    Ok(())
}
