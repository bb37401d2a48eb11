//! Bad input gives one clear error (what, where, what to do) and the right exit code, never a panic, and leaves no file.

mod common;

use std::fs;

use common::{autoshard, model};

struct Case<'a> {
    args: Vec<&'a str>,
    code: i32,
    says: &'a [&'a str],
}

fn check(cases: &[Case<'_>]) {
    for c in cases {
        let ran = autoshard(&c.args);
        let shown = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ").replace(" │ ", " ");
        assert_eq!(ran.code, c.code, "{:?}: {}", c.args, ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{:?}: {}", c.args, ran.stderr);
        for s in c.says {
            assert!(shown.contains(s), "{:?}: lacks `{s}` in: {}", c.args, ran.stderr);
        }
    }
}

#[test]
fn of_plan() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let good = model("gpt2-loss-dyn.onnx");
    let bytes = fs::read(&good).unwrap();
    let (cut, noise, absent, output) = (at("cut.onnx"), at("noise.onnx"), at("absent.onnx"), at("out.plan.json"));
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    fs::write(&noise, b"this is no model").unwrap();
    let nowhere = at("no/such/folder/p.json");
    let base = ["--dim", "sequence=16", "--global-batch", "16", "-o", &output];
    let plan = |file: &'_ str, more: &[&str]| -> Vec<String> {
        ["plan", file].iter().chain(&base).chain(more).map(|s| s.to_string()).collect()
    };
    let cases: Vec<(Vec<String>, i32, Vec<&str>)> = vec![
        (plan(&cut, &["--gpus", "8"]), 1, vec!["cut.onnx"]),
        (plan(&noise, &["--gpus", "8"]), 1, vec!["noise.onnx"]),
        (plan(&absent, &["--gpus", "8"]), 1, vec!["absent.onnx", "No such file"]),
        (plan(&good, &["--gpus", "0"]), 2, vec!["0 GPUs"]),
        (plan(&good, &["--gpus", "12"]), 2, vec!["12 GPUs"]),
        (plan(&good, &["--gpus", "8", "--cluster", "dgx-z1"]), 2, vec!["dgx-z1", "dgx-h100"]),
        (plan(&good, &["--gpus", "8", "--tp", "3"]), 2, vec!["--tp 3 does not divide 8 GPUs", "1, 2, 4, 8"]),
        (plan(&good, &["--gpus", "8", "--tp", "2", "--pp", "2", "--dp", "4"]), 2, vec!["is 16, not 8 GPUs"]),
        (
            plan(&good, &["--gpus", "8", "--tp", "18446744073709551615", "--pp", "2", "--dp", "2"]),
            2,
            vec!["--tp 18446744073709551615 does not divide 8 GPUs"],
        ),
        (plan(&good, &["--gpus", "8", "--seed", "-1"]), 2, vec!["invalid value '-1' for '--seed"]),
        (plan(&good, &["--gpus", "8", "--gap", "-1"]), 2, vec!["--gap from 0"]),
        (plan(&good, &["--gpus", "8", "--dim", "heads=4"]), 2, vec!["no symbol `heads`"]),
        (plan(&good, &["--gpus", "8", "--loss", "output:accuracy"]), 1, vec!["accuracy", "logits"]),
        (plan(&good, &["--gpus", "8", "--memory-limit", "0.0001"]), 3, vec!["no plan fits", "would help"]),
        (
            plan(&good, &["--gpus", "8", "--mode", "infer", "--recompute", "full"]),
            2,
            vec!["--recompute has no effect in inference"],
        ),
        (plan(&good, &["--gpus", "8", "--mode", "infer", "--zero", "0"]), 2, vec!["--zero has no effect in inference"]),
        (plan(&good, &["--gpus", "8", "--mode", "infer", "--optimizer", "sgd"]), 2, vec!["--optimizer has no effect"]),
        (
            plan(&good, &["--gpus", "2", "--mode", "infer", "--pp", "2", "--micro-batch", "2"]),
            3,
            vec!["the batch cannot be cut into micro-batches", "operand 0 is a sum over the batch", "--micro-batch"],
        ),
        (
            plan(&good, &["--gpus", "8", "--chunks", "18446744073709551615"]),
            2,
            vec!["chunks per stage: there are 1 to"],
        ),
        (plan(&good, &["--gpus", "8", "--recompute", "some"]), 2, vec!["none, selective, full, layers, auto"]),
        (plan(&good, &["--gpus", "8", "--zero", "4"]), 2, vec!["4 is not in 0..=3"]),
        (
            vec!["plan".into(), good.clone(), "--gpus".into(), "8".into(), "-o".into(), output.clone()],
            2,
            vec!["`sequence` is not known", "--dim sequence=N"],
        ),
        (
            vec![
                "plan".into(),
                good.clone(),
                "--gpus".into(),
                "8".into(),
                "--dim".into(),
                "sequence=16".into(),
                "-o".into(),
                nowhere.clone(),
            ],
            2,
            vec!["cannot write", "there is no folder"],
        ),
        (plan(&good, &["--gpus", "1000000000"]), 2, vec!["at most 1048576"]),
        (plan(&good, &["--gpus", "4", "--tp", "2", "--pp", "4"]), 2, vec!["8 ranks, which do not divide 4 GPUs"]),
        (plan(&good, &["--gpus", "4", "--micro-batch", "0"]), 2, vec!["--micro-batch must be 1 or more"]),
        (plan(&good, &["--gpus", "4", "--dp", "1", "--zero", "3"]), 2, vec!["--zero has no effect with --dp 1"]),
        (plan(&good, &["--gpus", "4", "--pp", "1", "--schedule", "gpipe"]), 2, vec!["--schedule has no effect"]),
        (
            plan(&good, &["--gpus", "4", "--tp", "1", "--sequence-parallel", "on"]),
            2,
            vec!["--sequence-parallel has no effect with --tp 1"],
        ),
        (
            plan(&good, &["--gpus", "4", "--tp", "1", "--sequence-parallel", "off"]),
            2,
            vec!["--sequence-parallel has no effect with --tp 1"],
        ),
        (vec!["inspect".into(), good.clone(), "--dim".into(), "heads=4".into()], 2, vec!["no symbol `heads`"]),
        (["inspect", &good, "--graph", "--json"].map(String::from).to_vec(), 2, vec!["cannot be used with"]),
        (
            ["plan", &good, "--gpus", "4", "--dim", "sequence=4096", "-o", &output].map(String::from).to_vec(),
            1,
            vec!["index 128 into 128 entries", "choose smaller sizes"],
        ),
    ];
    for (args, code, says) in &cases {
        check(&[Case { args: args.iter().map(String::as_str).collect(), code: *code, says }]);
    }
    assert!(!dir.path().join("out.plan.json").exists(), "a failed plan leaves no file");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "only the two bad models are there: {left:?}");
}

#[test]
fn of_plan_files() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (plan, model_copy) = (at("p.json"), at("m.onnx"));
    fs::copy(model("vit-loss-dyn.onnx"), &model_copy).unwrap();
    common::works(&["plan", &model_copy, "--gpus", "2", "--tp", "2", "--global-batch", "4", "-q", "-o", &plan]);
    let text = fs::read_to_string(&plan).unwrap();

    let newer = at("newer.json");
    fs::write(&newer, text.replacen("\"version\": 1", "\"version\": 2", 1)).unwrap();
    let broken = at("broken.json");
    fs::write(&broken, &text[..text.len() / 2]).unwrap();
    let odd = at("odd.json");
    fs::write(&odd, text.replacen("split ", "slice ", 1)).unwrap();
    check(&[
        Case { args: vec!["check", &newer], code: 1, says: &["format version 2", "make the plan anew"] },
        Case { args: vec!["check", &broken], code: 1, says: &["this is no plan"] },
        Case { args: vec!["check", &odd], code: 1, says: &["does not fit"] },
        Case { args: vec!["run", &plan, "--steps", "0"], code: 2, says: &["--steps must be 1 or more"] },
        Case { args: vec!["explain", &plan, "no-such-operator"], code: 1, says: &["no-such-operator"] },
        Case { args: vec!["explain", &plan, ""], code: 2, says: &["an empty name"] },
        Case { args: vec!["run", &plan, "--seed", "1", "--inputs", &plan], code: 2, says: &["--seed has no effect"] },
    ]);
    // Unknown fields are ignored.
    let more = at("more.json");
    fs::write(&more, text.replacen('{', "{\"comment\": \"kept\",", 1)).unwrap();
    common::works(&["check", &more]);
    // Another model under the same name is refused.
    fs::copy(model("vit-loss-leg.onnx"), &model_copy).unwrap();
    check(&[Case { args: vec!["check", &plan], code: 1, says: &["sha256", "make the plan anew"] }]);
    fs::remove_file(&model_copy).unwrap();
    check(&[Case { args: vec!["run", &plan], code: 1, says: &["is not there"] }]);
}

#[test]
fn plans_edited_by_hand_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (plan, edited) = (at("p.json"), at("edited.json"));
    let file = model("vit-loss-dyn.onnx");
    common::works(&["plan", &file, "--gpus", "2", "--dp", "2", "--global-batch", "4", "-q", "-o", &plan]);
    let whole: serde_json::Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    let edits: [(&str, serde_json::Value, &str); 7] = [
        ("/cluster/gpus", 8.into(), "contradict each other"),
        ("/mesh/axes/1/size", 0.into(), "has size 0"),
        ("/mesh/axes/1/name", "zz".into(), "unknown mesh axis `zz`"),
        ("/pipeline/virtual_stages", 2.into(), "2 virtual stages"),
        ("/operators/0/count", 99.into(), "in the plan 99 times"),
        ("/predicted/step_time_s", 1e-9.into(), "is predicted to take"),
        ("/predicted/peak_memory_bytes", serde_json::json!([]), "the plan has the memory of 0"),
    ];
    for (field, value, says) in edits {
        let mut doc = whole.clone();
        *doc.pointer_mut(field).unwrap_or_else(|| panic!("plans have {field}")) = value;
        fs::write(&edited, doc.to_string()).unwrap();
        check(&[Case { args: vec!["check", &edited], code: 1, says: &[says] }]);
    }
    common::works(&["check", &plan]);
}

#[test]
fn outputs_harm_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (file, plan, link) = (at("m.onnx"), at("p.json"), at("link.html"));
    fs::copy(model("vit-loss-dyn.onnx"), &file).unwrap();
    common::works(&["plan", &file, "--gpus", "2", "--global-batch", "4", "-q", "-o", &plan]);
    let bytes = |path: &str| fs::read(path).unwrap();
    let before = (bytes(&file), bytes(&plan));
    let (nowhere, below) = (at("no/o.npz"), at("m.onnx/checkpoints"));
    let (array, same, checkpoints) = (at("o.npy"), at("same.npz"), at("checkpoints"));
    check(&[
        Case { args: vec!["plan", &file, "--gpus", "2", "-o", &file], code: 2, says: &["the command reads it"] },
        Case { args: vec!["report", &plan, "-o", &plan], code: 2, says: &["the command reads it"] },
        Case { args: vec!["run", &plan, "--trace", &plan], code: 2, says: &["the command reads it"] },
        Case { args: vec!["run", &plan, "--outputs", &nowhere], code: 2, says: &["there is no folder"] },
        Case { args: vec!["run", &plan, "--checkpoint", &file], code: 2, says: &["it is no folder"] },
        Case { args: vec!["run", &plan, "--checkpoint", &below], code: 2, says: &["it is no folder"] },
        Case { args: vec!["run", &plan, "--outputs", &array, "--checkpoint", &checkpoints], code: 2, says: &[".npz"] },
        Case { args: vec!["run", &plan, "--outputs", &same, "--trace", &same], code: 2, says: &["writes it twice"] },
        Case { args: vec!["verify", &plan, "--tolerance", "inf"], code: 2, says: &["--tolerance inf"] },
        #[cfg(unix)]
        Case { args: vec!["report", &plan, "-o", "/dev/null"], code: 2, says: &["it is no regular file"] },
    ]);
    assert!(before == (bytes(&file), bytes(&plan)), "inputs are as they were");
    // A link stays a link, and what it leads to is written.
    #[cfg(unix)]
    {
        fs::write(at("page.html"), "old").unwrap();
        std::os::unix::fs::symlink(at("page.html"), &link).unwrap();
        common::works(&["report", &plan, "-o", &link]);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_ne!(bytes(&at("page.html")), b"old");
    }
}

#[test]
fn a_plan_knows_its_cluster_when_the_file_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (cluster, plan, page) = (at("mine.toml"), at("p.json"), at("p.html"));
    let text = common::works(&["clusters", "dgx-h100"]);
    fs::write(&cluster, text.replacen("name = \"dgx-h100\"", "name = \"mine\"", 1)).unwrap();
    let file = model("vit-loss-dyn.onnx");
    common::works(&["plan", &file, "--gpus", "2", "--global-batch", "4", "--cluster", &cluster, "-q", "-o", &plan]);
    fs::remove_file(&cluster).unwrap();
    common::works(&["check", &plan]);
    common::works(&["report", &plan, "-o", &page]);
}

#[test]
fn same_inputs_give_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut texts = Vec::new();
    for name in ["a.json", "b.json"] {
        let plan = dir.path().join(name);
        let args = ["--gpus", "4", "--global-batch", "8", "--dim", "sequence=12", "-q", "-o", plan.to_str().unwrap()];
        common::works(&[&["plan", &model("llama-loss-leg.onnx")], &args[..]].concat());
        texts.push(fs::read(&plan).unwrap());
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn output_that_nobody_reads_is_no_panic() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_autoshard"))
        .args(["clusters", "dgx-h100"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(!String::from_utf8_lossy(&out.stderr).contains("panicked"));
}
