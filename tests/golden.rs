//! What is decided and what is compiled, as text beside the tests (`tests/golden/`): plans of core models and the programs of one
//! transformer block, each under the same few configurations. A change of costs, strategies, schedule or layout shows as a
//! difference to be read; that results stay right is for the other tests.
//!
//! The snapshots are insta's, as everywhere here. To write them anew: [`BLESS`].

mod common;

use std::path::PathBuf;

use autoshard_cost_models::Cluster;
use autoshard_ir::graph::{Init, StateKind};
use autoshard_ir::{Builder, DType, Graph, Type};
use autoshard_planner::assignment::Schedule;
use autoshard_planner::request::{LossChoice, PlanRequest, Workload};
use autoshard_planner::search::search;
use serde_json::Value;

const BLESS: &str = "INSTA_UPDATE=always cargo test --workspace --locked --test golden";

/// Name, GPUs, pins of the command line, the same pins of a request.
type Configuration = (&'static str, usize, &'static [&'static str], fn(&mut PlanRequest));

const CONFIGURATIONS: [Configuration; 4] = [
    ("dp2", 2, &["--dp", "2"], |r| r.constraints.dp = Some(2)),
    ("tp2", 2, &["--tp", "2"], |r| r.constraints.tp = Some(2)),
    ("pp2-tp2", 4, &["--pp", "2", "--tp", "2", "--micro-batch", "2", "--schedule", "1f1b"], |r| {
        let c = &mut r.constraints;
        (c.pp, c.tp, c.micro_batch, c.schedule) = (Some(2), Some(2), Some(2), Some(Schedule::OneF1B));
    }),
    ("zero3", 2, &["--dp", "2", "--zero", "3"], |r| (r.constraints.dp, r.constraints.zero) = (Some(2), Some(3))),
];

fn golden(name: &str, text: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.snap"));
    let blessed = std::env::var_os("INSTA_UPDATE").is_some();
    assert!(file.exists() || blessed, "there is no {}; write it with\n  {BLESS}", file.display());
    println!("if what {name} shows is wanted, write it with\n  {BLESS}");
    insta::with_settings!({
        snapshot_path => "golden", prepend_module_to_snapshot => false, omit_expression => true
    }, { insta::assert_snapshot!(name, text) });
}

/// A JSON value on one line, numbers to six digits: the last ones may differ between machines.
fn short(v: &Value) -> String {
    match v {
        Value::Number(n) if n.is_f64() => format!("{:.5e}", n.as_f64().unwrap_or(f64::NAN)),
        Value::String(s) => s.clone(),
        Value::Array(all) => format!("[{}]", all.iter().map(short).collect::<Vec<_>>().join(", ")),
        Value::Object(o) => o.iter().map(|(k, v)| format!("{k}={}", short(v))).collect::<Vec<_>>().join(" "),
        Value::Null | Value::Bool(_) | Value::Number(_) => v.to_string(),
    }
}

/// A plan, one line per fact. Operators with the same choice are one line, with how many there are.
fn shown(plan: &Value) -> String {
    let mut lines: Vec<String> = Vec::new();
    for (key, v) in plan.as_object().expect("a plan is an object") {
        match v {
            Value::Array(rows) if rows.iter().all(Value::is_object) => {
                lines.push(format!("{key}:"));
                let mut merged: Vec<(String, u64)> = Vec::new();
                for row in rows {
                    let mut row = row.as_object().expect("just tested").clone();
                    let count = row.remove("count").and_then(|c| c.as_u64()).unwrap_or(1);
                    if key == "operators" {
                        row.remove("name");
                    }
                    let text = match (row.remove("op"), row.remove("inputs"), row.remove("outputs")) {
                        (Some(op), Some(ins), Some(outs)) => {
                            format!(
                                "{} {} -> {}  {}",
                                short(&op),
                                short(&ins),
                                short(&outs),
                                short(&Value::Object(row))
                            )
                        }
                        (None, None, None) => short(&Value::Object(row)),
                        other => panic!("an operator without operands: {other:?}"),
                    };
                    match merged.iter_mut().find(|(t, _)| *t == text) {
                        Some((_, n)) => *n += count,
                        None => merged.push((text, count)),
                    }
                }
                lines.extend(merged.into_iter().map(|(text, n)| format!("  {n} x {text}")));
            }
            Value::Array(rows) if !rows.is_empty() => {
                lines.push(format!("{key}:"));
                lines.extend(rows.iter().map(|r| format!("  {}", short(r))));
            }
            Value::Object(o) => {
                lines.push(format!("{key}:"));
                lines.extend(o.iter().map(|(k, v)| format!("  {k}: {}", short(v))));
            }
            _ => lines.push(format!("{key}: {}", short(v))),
        }
    }
    lines.join("\n")
}

#[test]
fn plans() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["gpt2-loss-dyn", "llama-loss-dyn", "vit-loss-dyn"] {
        for (name, gpus, pins, _) in CONFIGURATIONS {
            let make = |file: &str| {
                let file = dir.path().join(file);
                // Tests run in this folder; the plan holds the path as given.
                let path = format!("tests/models/{model}.onnx");
                let (file, gpus) = (file.to_str().unwrap().to_string(), gpus.to_string());
                let mut args = vec!["plan", &path, "--gpus", &gpus, "-o", &file, "--quiet", "--global-batch", "8"];
                args.extend(["--cluster", "dgx-h100"]);
                if !model.starts_with("vit") {
                    args.extend(["--dim", "sequence=12"]);
                }
                args.extend(pins);
                common::works(&args);
                std::fs::read_to_string(file).unwrap()
            };
            let (first, second) = (make("first.json"), make("second.json"));
            assert_eq!(first, second, "{model}, {name}: two runs, two plans");
            golden(&format!("{model}.{name}.plan"), &shown(&serde_json::from_str(&first).unwrap()));
        }
    }
}

/// One block of a transformer over embedded tokens, with a head.
fn block(batch: usize) -> Graph {
    let (s, h, heads, f) = (8, 16, 2, 32);
    let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
    let mut b = Builder::new("block");
    let x = b.input("x", f32(&[batch, s, h]), Some(0));
    let w = |b: &mut Builder, name: &str, dims: &[usize]| {
        let s = b.state(name, StateKind::Parameter, f32(dims), Init::Zeros, None);
        b.graph().state(s).read
    };
    let scale = w(&mut b, "norm.scale", &[h]);
    let normed = b.layer_norm(x, scale, None, 2, 1e-5).unwrap();
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let p = w(&mut b, name, &[h, h]);
        let y = b.einsum("bsh,hk->bsk", normed, p).unwrap();
        let y = b.reshape(y, &[batch, s, heads, h / heads]).unwrap();
        b.transpose(y, &[0, 2, 1, 3]).unwrap()
    });
    let scores = b.einsum("bnsd,bntd->bnst", q, k).unwrap();
    let probs = b.softmax(scores, 3).unwrap();
    let mixed = b.einsum("bnst,bntd->bnsd", probs, v).unwrap();
    let mixed = b.transpose(mixed, &[0, 2, 1, 3]).unwrap();
    let mixed = b.reshape(mixed, &[batch, s, h]).unwrap();
    let (o, up, down) = (w(&mut b, "o", &[h, h]), w(&mut b, "up", &[h, f]), w(&mut b, "down", &[f, h]));
    let y = b.einsum("bsh,hk->bsk", mixed, o).unwrap();
    let x = b.add(x, y).unwrap();
    let y = b.einsum("bsh,hf->bsf", x, up).unwrap();
    let y = b.tanh(y).unwrap();
    let y = b.einsum("bsf,fh->bsh", y, down).unwrap();
    let x = b.add(x, y).unwrap();
    b.output("y", x, Some(0));
    b.finish()
}

#[test]
fn programs() {
    for (name, gpus, _, pin) in CONFIGURATIONS {
        let cluster = Cluster::load("dgx-h100").unwrap().with_gpus(gpus).unwrap();
        let loss = LossChoice::Mse { output: "y".into(), target: "target".into() };
        let mut request = PlanRequest::new(Workload { loss, ..Workload::train(8) });
        pin(&mut request);
        let found = search(&|batch| Ok(block(batch)), &cluster, &request, None, &|_, _, _| {}).unwrap();
        let job = autoshard_codegen::compile(&found.best.step.graph, &found.best.assignment).unwrap();
        autoshard_runtime::verify::verify(&job).unwrap();
        golden(&format!("block.{name}.program"), &job.to_string());
    }
}
