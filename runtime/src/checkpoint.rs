//! Checkpoints: all states, unsharded, in safetensors files of bounded size with an index; loadable under any sharding.
//!
//! ```text
//! DIR/latest.json                        {"version": 1, "checkpoint": "step-00000012"}
//! DIR/step-00000012/index.json           step count, and per state its file
//! DIR/step-00000012/states-00001.safetensors ...
//! ```
//!
//! Invariant: whatever `latest.json` names is complete. Files are written and synced in a directory of another name, which
//! is then renamed; `latest.json` is replaced by a rename, last. A crash leaves at most a directory that begins with `.tmp-`.
//! At most one file's worth of states is in memory at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use autoshard_ir::{Tensor, Type};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use crate::boxes;
use crate::session::{Session, SessionError};
use crate::tensors;

/// Bytes of states per file; a larger state has a file of its own.
pub const FILE_BYTES: u64 = 1 << 30;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// What the system says.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A directory without a checkpoint.
    #[error("{} holds no checkpoint: it has no latest.json", path.display())]
    Absent {
        /// Which.
        path: PathBuf,
    },
    /// A file that is damaged, or not of a checkpoint.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A checkpoint of another model or optimizer.
    #[error("the checkpoint {} does not fit the model: {}", path.display(), reasons.join("; "))]
    Unfit {
        /// Which.
        path: PathBuf,
        /// What differs.
        reasons: Vec<String>,
    },
    /// States could not be read from or written to the ranks.
    #[error(transparent)]
    Session(#[from] SessionError),
}

#[derive(Serialize, Deserialize)]
struct Latest {
    version: u32,
    checkpoint: String,
}

#[derive(Serialize, Deserialize)]
struct Index {
    version: u32,
    /// Steps run.
    steps: u64,
    /// Per state: its file.
    states: BTreeMap<String, String>,
}

const VERSION: u32 = 1;

fn io(path: &Path) -> impl Fn(std::io::Error) -> CheckpointError + '_ {
    move |source| CheckpointError::Io { path: path.into(), source }
}

/// Writes a file that is complete or absent: to a temporary file beside it, synced, then renamed.
fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(dir).map_err(io(dir))?;
    temporary.write_all(bytes).and_then(|()| temporary.as_file().sync_all()).map_err(io(path))?;
    temporary.persist(path).map_err(|e| CheckpointError::Io { path: path.into(), source: e.error })?;
    sync_dir(dir)
}

/// Makes renames in a directory durable.
fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(io(dir))
}

/// Writes a checkpoint of all states under `dir`, and returns its directory. Earlier ones stay, except of the same step.
///
/// # Errors
/// What the system and the ranks say; nothing that `latest.json` names is touched then.
pub fn save(session: &mut Session, dir: &Path) -> Result<PathBuf, CheckpointError> {
    save_in_files_of(session, dir, FILE_BYTES)
}

/// [`save`] with files of at most `limit` bytes of states each.
///
/// # Errors
/// As `save`.
pub fn save_in_files_of(session: &mut Session, dir: &Path, limit: u64) -> Result<PathBuf, CheckpointError> {
    fs::create_dir_all(dir).map_err(io(dir))?;
    let building = tempfile::Builder::new().prefix(".tmp-").tempdir_in(dir).map_err(io(dir))?;
    let mut index = Index { version: VERSION, steps: session.steps(), states: BTreeMap::new() };
    let mut files: Vec<Vec<String>> = Vec::new();
    let mut filled = u64::MAX;
    for (name, ty) in session.state_types() {
        let bytes = ty.bytes() as u64;
        if filled.saturating_add(bytes) > limit {
            files.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(last) = files.last_mut() {
            last.push(name);
        }
    }
    for (i, names) in files.iter().enumerate() {
        let file = format!("states-{:05}.safetensors", i + 1);
        let mut states = Vec::new();
        for name in names {
            states.push((name.clone(), session.state(name)?));
            index.states.insert(name.clone(), file.clone());
        }
        let path = building.path().join(&file);
        let bytes = tensors::to_safetensors(&states)
            .map_err(|reason| CheckpointError::Damaged { path: path.clone(), reason })?;
        let mut out = File::create(&path).map_err(io(&path))?;
        out.write_all(&bytes).and_then(|()| out.sync_all()).map_err(io(&path))?;
    }
    let path = building.path().join("index.json");
    json(&index)
        .and_then(|text| fs::write(&path, text))
        .and_then(|()| File::open(&path)?.sync_all())
        .map_err(io(&path))?;
    sync_dir(building.path())?;
    let name = format!("step-{:08}", session.steps());
    let target = dir.join(&name);
    if target.exists() {
        // Of the same step: moved away whole, so that a crash leaves either the old or the new one.
        let old = tempfile::Builder::new().prefix(".tmp-").tempdir_in(dir).map_err(io(dir))?;
        fs::rename(&target, old.path().join("old")).map_err(io(&target))?;
        fs::rename(building.path(), &target).map_err(io(&target))?;
    } else {
        fs::rename(building.path(), &target).map_err(io(&target))?;
    }
    sync_dir(dir)?;
    let latest = dir.join("latest.json");
    write_atomically(&latest, &json(&Latest { version: VERSION, checkpoint: name }).map_err(io(&latest))?)?;
    Ok(target)
}

fn json(x: &impl Serialize) -> Result<Vec<u8>, std::io::Error> {
    let mut text = serde_json::to_vec_pretty(x)?;
    text.push(b'\n');
    Ok(text)
}

/// A checkpoint that was opened: its index is read, its states are not.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    steps: u64,
    files: BTreeMap<String, memmap2::Mmap>,
    states: BTreeMap<String, (Type, String)>,
}

fn parse<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, CheckpointError> {
    let text = fs::read(path).map_err(io(path))?;
    serde_json::from_slice(&text)
        .map_err(|e| CheckpointError::Damaged { path: path.into(), reason: format!("is not a checkpoint's: {e}") })
}

impl Checkpoint {
    /// Opens the latest checkpoint under `dir`, or `dir` itself when it is one.
    ///
    /// # Errors
    /// None there; files that are damaged or of a later version.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let damaged = |path: &Path, reason: String| CheckpointError::Damaged { path: path.into(), reason };
        let version = |path: &Path, v: u32| {
            let reason = format!("has version {v}, this program reads {VERSION}");
            if v == VERSION { Ok(()) } else { Err(damaged(path, reason)) }
        };
        let mut dir = dir.to_path_buf();
        if !dir.join("index.json").exists() {
            let path = dir.join("latest.json");
            if !path.exists() {
                return Err(CheckpointError::Absent { path: dir });
            }
            let latest: Latest = parse(&path)?;
            version(&path, latest.version)?;
            dir.push(plain(&latest.checkpoint).ok_or_else(|| damaged(&path, "names no directory beside it".into()))?);
        }
        let path = dir.join("index.json");
        let index: Index = parse(&path)?;
        version(&path, index.version)?;
        let mut files = BTreeMap::new();
        let mut states = BTreeMap::new();
        for (name, file) in index.states {
            let at = dir.join(plain(&file).ok_or_else(|| damaged(&path, format!("`{file}` is not a file beside it")))?);
            if !files.contains_key(&file) {
                let open = File::open(&at).map_err(io(&at))?;
                // SAFETY: the map is only read; complete checkpoints are not changed.
                files.insert(file.clone(), unsafe { memmap2::Mmap::map(&open) }.map_err(io(&at))?);
            }
            let parsed = SafeTensors::deserialize(&files[&file]).map_err(|e| damaged(&at, e.to_string()))?;
            let view = parsed.tensor(&name).map_err(|e| damaged(&at, format!("state `{name}`: {e}")))?;
            let dtype = tensors::from_safetensors_dtype(view.dtype())
                .ok_or_else(|| damaged(&at, format!("state `{name}` has element type {:?}", view.dtype())))?;
            states.insert(name, (Type::new(dtype, view.shape()), file));
        }
        Ok(Checkpoint { dir, steps: index.steps, files, states })
    }

    /// Steps run when it was written.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Its states and their types.
    pub fn states(&self) -> impl Iterator<Item = (&str, &Type)> {
        self.states.iter().map(|(n, (t, _))| (n.as_str(), t))
    }

    /// A box of a state.
    ///
    /// # Errors
    /// An unknown name, a box outside the state.
    pub fn read(&self, name: &str, region: &[Range<usize>]) -> Result<Tensor, CheckpointError> {
        let damaged = |reason: String| CheckpointError::Damaged { path: self.dir.clone(), reason };
        let (ty, file) = self.states.get(name).ok_or_else(|| damaged(format!("has no state `{name}`")))?;
        let inside =
            region.len() == ty.rank() && region.iter().zip(&ty.dims).all(|(r, d)| r.start <= r.end && r.end <= *d);
        if !inside {
            return Err(damaged(format!("box {region:?} is not within state `{name}` {ty}")));
        }
        let parsed = SafeTensors::deserialize(&self.files[file]).map_err(|e| damaged(e.to_string()))?;
        let view = parsed.tensor(name).map_err(|e| damaged(e.to_string()))?;
        let origin: Vec<usize> = region.iter().map(|r| r.start).collect();
        let dims: Vec<usize> = region.iter().map(|r| r.end - r.start).collect();
        let mut out = Tensor::zeros(Type::new(ty.dtype, dims.clone()));
        boxes::cut(view.data(), &ty.dims, &origin, out.bytes_mut(), &dims, ty.dtype.size());
        Ok(out)
    }

    /// Replaces all states of a session, under whatever sharding, and its step count.
    ///
    /// # Errors
    /// States that one has and the other has not, or of other types, before anything is replaced.
    pub fn load(&self, session: &mut Session) -> Result<(), CheckpointError> {
        let mut reasons = Vec::new();
        let wanted = session.state_types();
        for (name, ty) in &wanted {
            match self.states.get(name) {
                None => reasons.push(format!("it lacks state `{name}`")),
                Some((t, _)) if t != ty => reasons.push(format!("its state `{name}` is {t}, the model's {ty}")),
                Some(_) => {}
            }
        }
        let unknown = self.states.keys().filter(|n| !wanted.contains_key(*n));
        reasons.extend(unknown.map(|n| format!("the model has no state `{n}`")));
        if !reasons.is_empty() {
            return Err(CheckpointError::Unfit { path: self.dir.clone(), reasons });
        }
        for name in wanted.keys() {
            session.replace_state(name, |region| self.read(name, region).map_err(|e| e.to_string()))?;
        }
        session.set_steps(self.steps);
        Ok(())
    }
}

/// A file name without directories, so that an index cannot point elsewhere.
fn plain(name: &str) -> Option<&str> {
    (Path::new(name).file_name()?.to_str()? == name).then_some(name)
}
