//! Holds what ARCHITECTURE.md promises of the structure: which crate may know which, and that files say what they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The crates that a crate of the workspace may depend on.
fn allowed() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    BTreeMap::from([
        ("ir", BTreeSet::from([])),
        ("cost_models", BTreeSet::from(["ir"])),
        ("planner", BTreeSet::from(["ir", "cost_models"])),
        ("runtime", BTreeSet::from(["ir"])),
        ("codegen", BTreeSet::from(["ir", "cost_models", "planner", "runtime"])),
    ])
}

fn dependencies(manifest: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(manifest).unwrap();
    let mut inside = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('[') {
            inside = line.trim() == "[dependencies]";
        } else if inside && let Some(rest) = line.strip_prefix("autoshard-") {
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
            found.insert(name.replace('-', "_"));
        }
    }
    found
}

#[test]
fn arrows_between_crates_go_one_way() {
    for (name, may) in allowed() {
        let has = dependencies(&root().join(name).join("Cargo.toml"));
        let wrong: Vec<&String> = has.iter().filter(|d| !may.contains(d.as_str())).collect();
        assert!(wrong.is_empty(), "{name} must not depend on {wrong:?}");
    }
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

fn all_sources() -> Vec<PathBuf> {
    let mut out = Vec::new();
    for dir in allowed().keys().map(|c| root().join(c).join("src")).chain([root().join("src")]) {
        sources(&dir, &mut out);
    }
    out.sort();
    out
}

#[test]
fn every_file_says_what_it_holds() {
    let silent: Vec<PathBuf> =
        all_sources().into_iter().filter(|p| !fs::read_to_string(p).unwrap().starts_with("//! ")).collect();
    assert!(silent.is_empty(), "files without a `//!` header: {silent:?}");
}

#[test]
fn the_intermediate_representation_knows_no_mesh() {
    let words = ["AxisId", "Mesh", "Rank(", "autoshard_planner", "autoshard_runtime"];
    for path in all_sources().into_iter().filter(|p| p.starts_with(root().join("ir"))) {
        let text = fs::read_to_string(&path).unwrap();
        for word in words {
            assert!(!text.contains(word), "{} mentions {word}", path.display());
        }
    }
}
