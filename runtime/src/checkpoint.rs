//! Checkpoints: all states, unsharded, in safetensors files of bounded size with an index; loadable under any sharding.
//!
//! ```text
//! DIR/latest.json                        {"version": 2, "checkpoint": "step-00000012", "sha256": of its index.json}
//! DIR/step-00000012/index.json           step count, sha256 of each file, and per state its kind and file
//! DIR/step-00000012/states-00001.safetensors ...
//! ```
//!
//! Invariant: whatever `latest.json` names is complete. Files are written and synced in a directory of another name, which
//! is then renamed to one that nothing has; `latest.json` is replaced by a rename, last. An earlier checkpoint of the same
//! step is removed after that. A crash leaves at most a directory that nothing names.
//! At most one file's worth of states is in memory at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use autoshard_ir::graph::StateKind;
use autoshard_ir::{Tensor, Type};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::boxes;
use crate::files;
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
    #[error("the checkpoint {} does not fit: {}", path.display(), first(reasons))]
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

/// The first reasons, and how many more there are.
fn first(reasons: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = reasons[..reasons.len().min(SHOWN)].join("; ");
    if reasons.len() > SHOWN {
        text += &format!("; and {} more", reasons.len() - SHOWN);
    }
    text
}

#[derive(Serialize, Deserialize)]
struct Latest {
    version: u32,
    checkpoint: String,
    /// Of its index.
    sha256: String,
}

#[derive(Serialize, Deserialize)]
struct Index {
    version: u32,
    /// Steps run.
    steps: u64,
    /// Per file: its sha256.
    files: BTreeMap<String, String>,
    /// Per state: what and where.
    states: BTreeMap<String, StateEntry>,
}

#[derive(Serialize, Deserialize)]
struct StateEntry {
    /// An optimizer's, which only training with that optimizer has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    optimizer: bool,
    file: String,
}

const VERSION: u32 = 2;

fn io(path: &Path) -> impl Fn(std::io::Error) -> CheckpointError + '_ {
    move |source| CheckpointError::Io { path: path.into(), source }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
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
    let building = files::building(dir).map_err(io(dir))?;
    let kinds = session.state_kinds();
    let mut index = Index { version: VERSION, steps: session.steps(), files: BTreeMap::new(), states: BTreeMap::new() };
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
            let optimizer = kinds.get(name) == Some(&StateKind::Optimizer);
            index.states.insert(name.clone(), StateEntry { optimizer, file: file.clone() });
        }
        let path = building.path().join(&file);
        let bytes = tensors::to_safetensors(&states)
            .map_err(|reason| CheckpointError::Damaged { path: path.clone(), reason })?;
        let mut out = File::create(&path).map_err(io(&path))?;
        out.write_all(&bytes).and_then(|()| out.sync_all()).map_err(io(&path))?;
        index.files.insert(file, sha256(&bytes));
    }
    let path = building.path().join("index.json");
    let text = json(&index).map_err(io(&path))?;
    files::write(&path, &text).map_err(io(&path))?;
    let step = format!("step-{:08}", session.steps());
    let earlier = of_step(dir, &step).map_err(io(dir))?;
    let name = (0u32..)
        .map(|n| if n == 0 { step.clone() } else { format!("{step}.{n}") })
        .find(|name| !dir.join(name).exists())
        .expect("a folder has finitely many entries");
    let target = dir.join(&name);
    fs::rename(building.path(), &target).map_err(io(&target))?;
    files::sync_dir(dir).map_err(io(dir))?;
    let latest = dir.join("latest.json");
    let named = json(&Latest { version: VERSION, checkpoint: name, sha256: sha256(&text) }).map_err(io(&latest))?;
    files::write(&latest, &named).map_err(io(&latest))?;
    for old in earlier {
        fs::remove_dir_all(&old).map_err(io(&old))?;
    }
    Ok(target)
}

/// The checkpoints of a step: `step-00000012`, `step-00000012.1`, ...
fn of_step(dir: &Path, step: &str) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.strip_prefix(step).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')) && path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
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
    states: BTreeMap<String, State>,
}

#[derive(Debug)]
struct State {
    ty: Type,
    optimizer: bool,
    file: String,
}

fn parse<T: for<'a> Deserialize<'a>>(path: &Path, text: &[u8]) -> Result<T, CheckpointError> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
    let syntax = |e| damaged(format!("is not a checkpoint's: {e}"));
    let head: Head = serde_json::from_slice(text).map_err(syntax)?;
    if head.version != VERSION {
        return Err(damaged(format!("has version {}, this program reads {VERSION}", head.version)));
    }
    serde_json::from_slice(text).map_err(syntax)
}

/// Refuses what is not as it was written.
fn intact(path: &Path, bytes: &[u8], sha256_written: &str) -> Result<(), CheckpointError> {
    let found = sha256(bytes);
    if found == sha256_written {
        return Ok(());
    }
    let reason = format!("has sha256 {found}, it was written with {sha256_written}: use another checkpoint");
    Err(CheckpointError::Damaged { path: path.into(), reason })
}

impl Checkpoint {
    /// Opens the latest checkpoint under `dir`, or `dir` itself when it is one, and reads all of it once to see that it is
    /// as it was written.
    ///
    /// # Errors
    /// None there; files that are damaged or of another version.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let damaged = |path: &Path, reason: String| CheckpointError::Damaged { path: path.into(), reason };
        let mut dir = dir.to_path_buf();
        let mut written = None;
        if !dir.join("index.json").exists() {
            let path = dir.join("latest.json");
            if !path.exists() {
                return Err(CheckpointError::Absent { path: dir });
            }
            let latest: Latest = parse(&path, &fs::read(&path).map_err(io(&path))?)?;
            dir.push(plain(&latest.checkpoint).ok_or_else(|| damaged(&path, "names no directory beside it".into()))?);
            written = Some(latest.sha256);
        }
        let path = dir.join("index.json");
        let text = fs::read(&path).map_err(io(&path))?;
        if let Some(written) = &written {
            intact(&path, &text, written)?;
        }
        let index: Index = parse(&path, &text)?;
        let mut files = BTreeMap::new();
        for (file, written) in &index.files {
            let at = dir.join(plain(file).ok_or_else(|| damaged(&path, format!("`{file}` is not a file beside it")))?);
            let open = File::open(&at).map_err(io(&at))?;
            // SAFETY: the map is only read; complete checkpoints are not changed.
            let map = unsafe { memmap2::Mmap::map(&open) }.map_err(io(&at))?;
            intact(&at, &map, written)?;
            files.insert(file.clone(), map);
        }
        let mut states = BTreeMap::new();
        for (name, StateEntry { optimizer, file }) in index.states {
            let at = dir.join(&file);
            let map = files.get(&file).ok_or_else(|| damaged(&path, format!("has no sha256 of `{file}`")))?;
            let parsed = SafeTensors::deserialize(map).map_err(|e| damaged(&at, e.to_string()))?;
            let view = parsed.tensor(&name).map_err(|e| damaged(&at, format!("state `{name}`: {e}")))?;
            let dtype = tensors::from_safetensors_dtype(view.dtype())
                .ok_or_else(|| damaged(&at, format!("state `{name}` has element type {:?}", view.dtype())))?;
            states.insert(name, State { ty: Type::new(dtype, view.shape()), optimizer, file });
        }
        Ok(Checkpoint { dir, steps: index.steps, files, states })
    }

    /// Steps run when it was written.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Its states and their types.
    pub fn states(&self) -> impl Iterator<Item = (&str, &Type)> {
        self.states.iter().map(|(n, s)| (n.as_str(), &s.ty))
    }

    /// A box of a state.
    ///
    /// # Errors
    /// An unknown name, a box outside the state.
    pub fn read(&self, name: &str, region: &[Range<usize>]) -> Result<Tensor, CheckpointError> {
        let damaged = |reason: String| CheckpointError::Damaged { path: self.dir.clone(), reason };
        let State { ty, file, .. } = self.states.get(name).ok_or_else(|| damaged(format!("has no state `{name}`")))?;
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

    /// Replaces all states of a session, under whatever sharding, and its step count. A session that does not train takes
    /// the parameters and leaves the optimizer's states.
    ///
    /// # Errors
    /// States that one has and the other has not, or of other types, before anything is replaced.
    pub fn load(&self, session: &mut Session) -> Result<(), CheckpointError> {
        let mut reasons = Vec::new();
        let wanted = session.state_types();
        for (name, ty) in &wanted {
            match self.states.get(name) {
                None => reasons.push(format!("it lacks state `{name}`")),
                Some(s) if s.ty != *ty => reasons.push(format!("its state `{name}` is {}, the plan's {ty}", s.ty)),
                Some(_) => {}
            }
        }
        let trains = session.state_kinds().into_values().any(|k| k == StateKind::Optimizer);
        let unknown = self.states.iter().filter(|(n, s)| !wanted.contains_key(*n) && (trains || !s.optimizer));
        reasons.extend(unknown.map(|(n, _)| format!("the plan has no state `{n}`")));
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
