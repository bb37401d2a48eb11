//! Reading and writing files: whole or not at all, with errors that name the path.

use std::io::Write;
use std::path::Path;

use crate::failure::Failure;

/// Writes a file through a temporary one beside it, so that no partial file is ever left behind.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let fail = |e: std::io::Error| {
        Failure::new(format!("cannot write {}: {e}", path.display())).help("choose another place with -o")
    };
    let dir = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
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
