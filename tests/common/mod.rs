//! Runs the program as a user does.
#![allow(dead_code, missing_docs)]

use std::path::PathBuf;
use std::process::Command;

pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

pub fn autoshard(args: &[&str]) -> Ran {
    let out = Command::new(env!("CARGO_BIN_EXE_autoshard")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    Ran { code: out.status.code().unwrap_or(-1), stdout: text(&out.stdout), stderr: text(&out.stderr) }
}

/// Runs, and fails the test unless the program succeeds.
pub fn works(args: &[&str]) -> String {
    let ran = autoshard(args);
    assert_eq!(ran.code, 0, "autoshard {}: {}", args.join(" "), ran.stderr);
    ran.stdout
}

pub fn model(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name).to_str().unwrap().to_string()
}
