//! What can be wrong with a cluster: its name, its file, its figures, the number of GPUs asked of it.

use std::fmt;
use std::path::PathBuf;

/// Why there is no such cluster.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// Neither an embedded cluster nor an existing file.
    #[error("there is no cluster or file named `{name}`{}; known clusters: {}; or give the path of a cluster file: TOML, or the output of `nvidia-smi topo -m`", suggest(.suggestion), .known.join(", "))]
    Unknown {
        /// What was asked for.
        name: String,
        /// The closest known name, when one is close.
        suggestion: Option<String>,
        /// All known names.
        known: Vec<String>,
    },
    /// The file cannot be read.
    #[error("cannot read cluster file {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// Not TOML, or not of the right shape.
    #[error("{origin} is not a valid cluster file: {reason}")]
    Parse {
        /// File or embedded cluster.
        origin: String,
        /// With line and column.
        reason: String,
    },
    /// The output of `nvidia-smi topo -m`, but not one that a cluster can be made of.
    #[error("{origin}: {reason}")]
    Topology {
        /// The file.
        origin: String,
        /// With line and column where there is one.
        reason: String,
    },
    /// `device` was given for a cluster that names its own.
    #[error(
        "a device ({device}) is given, but {cluster} names its own: it is for the output of `nvidia-smi topo -m` only"
    )]
    Device {
        /// The cluster.
        cluster: String,
        /// What was given.
        device: String,
    },
    /// Well formed, but its figures cannot be; all problems.
    #[error("{origin} describes no usable cluster:{}", bullets(.problems))]
    Invalid {
        /// File or embedded cluster.
        origin: String,
        /// Each with where, what and what to do.
        problems: Vec<Problem>,
    },
    /// The number of GPUs does not fit.
    #[error("{gpus} GPUs do not fit {cluster}: {reason}; {valid}")]
    Gpus {
        /// The cluster.
        cluster: String,
        /// Asked for.
        gpus: usize,
        /// Why not.
        reason: String,
        /// Which numbers would fit.
        valid: String,
    },
}

/// One thing wrong in a cluster file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key: `tier[1].bandwidth_gb_s`.
    pub at: String,
    /// What is wrong and what would be right.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

fn bullets(problems: &[Problem]) -> String {
    problems.iter().map(|p| format!("\n  - {p}")).collect()
}

fn suggest(name: &Option<String>) -> String {
    name.as_ref().map_or(String::new(), |n| format!(" (did you mean `{n}`?)"))
}
