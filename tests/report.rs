//! The report in a real browser: it draws every section from one file, without network.

mod common;

use std::process::Command;

fn browser() -> Option<&'static str> {
    ["chromium", "google-chrome", "chromium-browser"]
        .into_iter()
        .find(|b| Command::new(b).arg("--version").output().is_ok_and(|o| o.status.success()))
}

#[test]
fn the_page_draws_every_section_in_chromium() {
    let Some(browser) = browser() else {
        // CI installs one (tests/setup.sh browser), so there this cannot pass unseen.
        assert!(std::env::var_os("CI").is_none(), "CI needs Chromium for this test");
        eprintln!("skipped: no Chromium on this machine");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (plan, page) = (dir.path().join("plan.json"), dir.path().join("plan.html"));
    let (plan, page) = (plan.to_str().unwrap(), page.to_str().unwrap());
    let model = common::model("gpt2-loss-dyn.onnx");
    let pins = ["--tp", "2", "--pp", "2", "--micro-batch", "2", "--global-batch", "8", "--dim", "sequence=16"];
    common::works(&[&["plan", &model, "--gpus", "4", "--quiet", "-o", plan], &pins[..]].concat());
    common::works(&["report", plan, "-o", page]);

    let text = std::fs::read_to_string(page).unwrap();
    for remote in ["src=\"http", "href=\"http", "url(http", "@import"] {
        assert!(!text.contains(remote), "the page must not load anything: {remote}");
    }
    let profile = dir.path().join("profile");
    let out = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{page}"))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&out.stdout);
    assert!(
        dom.contains("data-ready=\"yes\""),
        "the script did not reach its end: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    let body = &dom[..dom.find("id=\"data\"").unwrap_or(dom.len())];
    for want in [
        "gpt2-loss-dyn.onnx on 4 GPUs",
        "Use tensor parallelism over 2, pipeline parallelism over 2",
        "data-stage=\"1\"",
        "2 pipeline stages, each of tp=2",
        "forward of micro-batch 3",
        "backward of micro-batch 0",
        "Einsum",
        "all-reduce over tp",
        "the plan",
        "bf16 compute (--precision)",
    ] {
        assert!(body.contains(want), "the page lacks `{want}`");
    }
}
