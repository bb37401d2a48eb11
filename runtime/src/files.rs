//! Writing files whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The folder that a path lies in.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

/// Writes a file through a temporary one beside it, synced and then renamed, so that no partial file is ever seen. A link
/// stays a link. A file that was there keeps its rights; a new one gets those of every new file.
///
/// # Errors
/// What the system says; the file is as it was then.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let path = &fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    let dir = folder(path);
    let mut builder = tempfile::Builder::new();
    let file = ordinary(&mut builder, 0o666);
    let mut file = file.tempfile_in(dir)?;
    file.write_all(bytes)?;
    if let Ok(old) = fs::metadata(path) {
        file.as_file().set_permissions(old.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    sync_dir(dir)
}

/// Makes renames in a directory durable.
///
/// # Errors
/// What the system says.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir).and_then(|d| d.sync_all())
}

/// A temporary directory with the rights of an ordinary one, where something is built before it gets its name.
///
/// # Errors
/// What the system says.
pub(crate) fn building(dir: &Path) -> io::Result<tempfile::TempDir> {
    ordinary(tempfile::Builder::new().prefix(".tmp-"), 0o777).tempdir_in(dir)
}

/// Temporary files are private; these become ordinary ones, with the mode that the umask leaves.
fn ordinary<'a, 'b, 'c>(builder: &'a mut tempfile::Builder<'b, 'c>, mode: u32) -> &'a mut tempfile::Builder<'b, 'c> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(mode));
    }
    builder
}
