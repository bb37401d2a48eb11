//! Reading and writing files: whole or not at all, with errors that name the path.

use std::path::{Path, PathBuf};

use autoshard_runtime::files::folder;

use crate::failure::Failure;

/// One name for a file, by whatever path; it need not be there.
fn identity(path: &Path) -> Option<PathBuf> {
    let beside = || Some(std::fs::canonicalize(folder(path)).ok()?.join(path.file_name()?));
    std::fs::canonicalize(path).ok().or_else(beside)
}

/// Whether a file can be written there without harm: before the work, so that none is lost. `others` are what the command
/// reads, and writes besides.
pub fn check_output(path: &Path, others: &[&Path]) -> Result<(), Failure> {
    let refuse =
        |why: &str| Err(Failure::usage(format!("cannot write {}: {why}", path.display())).help("choose another place"));
    if path.is_dir() {
        return refuse("it is a folder");
    }
    if path.exists() && !path.is_file() {
        return refuse("it is no regular file");
    }
    if let Some(output) = identity(path)
        && others.iter().any(|i| identity(i).as_ref() == Some(&output))
    {
        return refuse("the command reads it, or writes it twice");
    }
    if !folder(path).is_dir() {
        return refuse(&format!("there is no folder {}", folder(path).display()));
    }
    probe(path, folder(path))
}

/// Whether files can be written into a folder, which need not be there yet.
pub fn check_folder(path: &Path) -> Result<(), Failure> {
    let there = path.ancestors().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    let Some(there) = there.into_iter().find(|p| p.exists()).filter(|p| p.is_dir()) else {
        return Err(Failure::usage(format!("cannot write into {}: it is no folder", path.display()))
            .help("choose another place"));
    };
    probe(path, there)
}

/// Writes a file into a folder and takes it away again.
fn probe(path: &Path, folder: &Path) -> Result<(), Failure> {
    tempfile::NamedTempFile::new_in(folder).map(|_| ()).map_err(|e| {
        // The error would name the probe.
        Failure::new(format!("cannot write {}: {}", path.display(), e.kind())).help("choose another place")
    })
}

/// Writes a file, whole or not at all.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    autoshard_runtime::files::write(path, bytes)
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())).help("choose another place"))
}

/// Reads a text file.
pub fn read(path: &Path, what: &str) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|e| Failure::new(format!("cannot read the {what} {}: {e}", path.display())))
}

/// A path with its extensions (`.onnx`, `.plan.json`, `.json`) replaced.
pub fn with_suffix(path: &Path, suffix: &str) -> std::path::PathBuf {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = [".onnx", ".plan.json", ".json"].iter().find_map(|e| name.strip_suffix(e)).unwrap_or(&name);
    path.with_file_name(format!("{stem}{suffix}"))
}
