//! What commands print of plans is true: of themselves, of throughput, of bounds in bytes, of outputs that need the whole
//! batch.

mod common;

use common::{model, works};

fn plan(dir: &tempfile::TempDir, name: &str, file: &str, flags: &[&str]) -> (String, String) {
    let path = dir.path().join(name).to_str().unwrap().to_string();
    let file = model(file);
    let said = works(&[&["plan", &file, "--quiet", "-o", &path], flags].concat());
    (path, said)
}

#[test]
fn a_plan_does_not_differ_from_itself() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--gpus", "4", "--dp", "2", "--tp", "2", "--zero", "3", "--global-batch", "8"];
    let (path, said) = plan(&dir, "p.json", "vit-loss-dyn.onnx", &flags);
    let text = works(&["diff", &path, &path]);
    assert!(text.contains("all operators and states are split alike") && !text.contains("differs"), "{text}");
    assert!(said.contains(" samples/s") && said.contains("4 GPUs of dgx-h100 (--cluster)"), "{said}");
    let (other, _) =
        plan(&dir, "q.json", "vit-loss-dyn.onnx", &["--gpus", "4", "--mode", "infer", "--global-batch", "8"]);
    let operators = |text: &str| text.lines().filter(|l| l.contains("absent")).count();
    let (there, back) = (works(&["diff", &path, &other]), works(&["diff", &other, &path]));
    assert!(operators(&there) > 0, "{there}");
    assert_eq!(operators(&there), operators(&back), "what only one plan has is listed from either side");
}

#[test]
fn bounds_of_least_memory_are_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--gpus", "2", "--objective", "memory", "--global-batch", "4", "--dim", "sequence=16"];
    let (path, said) = plan(&dir, "p.json", "gpt2-loss-dyn.onnx", &flags);
    assert!(said.contains(" tokens/s") && said.contains("takes less than"), "{said}");
    let page = dir.path().join("p.html");
    works(&["report", &path, "-o", page.to_str().unwrap()]);
    let text = std::fs::read_to_string(page).unwrap();
    let bound = text.split("\"bound\":\"").nth(1).and_then(|t| t.split('"').next()).unwrap();
    assert!(bound.ends_with("iB"), "{bound}");
}

#[test]
fn a_loss_of_the_whole_batch_is_that_of_the_whole_batch() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--mode", "infer", "--gpus", "2", "--pp", "2", "--precision", "fp32", "--global-batch", "8"];
    let (path, said) = plan(&dir, "p.json", "gpt2-loss-dyn.onnx", &[&flags[..], &["--dim", "sequence=12"]].concat());
    assert!(said.contains("1 micro-batch of 8") && said.contains("not cut into micro-batches"), "{said}");
    works(&["verify", &path]);
    works(&["check", &path]);
}
