//! Reading and writing files: whole or not at all, with errors that name the path.

use std::io::Write;
use std::path::Path;

use crate::failure::Failure;

/// The folder of a path.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

/// Whether a file can be written there without harm: before the work, so that none is lost. `inputs` are what the command
/// reads.
pub fn check_output(path: &Path, inputs: &[&Path]) -> Result<(), Failure> {
    let refuse =
        |why: &str| Err(Failure::usage(format!("cannot write {}: {why}", path.display())).help("choose another place"));
    if path.is_dir() {
        return refuse("it is a folder");
    }
    if path.exists() && !path.is_file() {
        return refuse("it is no regular file");
    }
    let whole = |p: &Path| std::fs::canonicalize(p).ok();
    if let Some(output) = whole(path)
        && inputs.iter().any(|i| whole(i).as_ref() == Some(&output))
    {
        return refuse("the command reads it");
    }
    if !folder(path).is_dir() {
        return refuse(&format!("there is no folder {}", folder(path).display()));
    }
    let probe = tempfile::NamedTempFile::new_in(folder(path)).map(|_| ());
    probe.map_err(|e| {
        // The error would name the probe.
        Failure::new(format!("cannot write {}: {}", path.display(), e.kind())).help("choose another place")
    })
}

/// Writes a file through a temporary one beside it, so that no partial file is ever left behind. A link stays a link.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let fail =
        |e: std::io::Error| Failure::new(format!("cannot write {}: {e}", path.display())).help("choose another place");
    let path = &std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let dir = folder(path);
    let mut file = tempfile::NamedTempFile::new_in(dir).map_err(fail)?;
    file.write_all(bytes).map_err(fail)?;
    file.as_file().sync_all().map_err(fail)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // A temporary file is private; the result is an ordinary one.
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).map_err(fail)?;
    }
    file.persist(path).map_err(|e| fail(e.error))?;
    Ok(())
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
