//! The embedded clusters, and loading one by name or from a file.
//!
//! `hardware/devices.toml` lists devices, `hardware/clusters/*.toml` one cluster each, in the form that users write.

use std::path::Path;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::error::ClusterError;
use crate::hardware::{Cluster, ClusterFile, Device, device_problems};
use crate::nvidia_smi;

/// Name and text of each embedded cluster, sorted by name.
pub const CLUSTERS: &[(&str, &str)] = &[
    ("a3-highgpu-8g", include_str!("../hardware/clusters/a3-highgpu-8g.toml")),
    ("a3-megagpu-8g", include_str!("../hardware/clusters/a3-megagpu-8g.toml")),
    ("a3-ultragpu-8g", include_str!("../hardware/clusters/a3-ultragpu-8g.toml")),
    ("a4-highgpu-8g", include_str!("../hardware/clusters/a4-highgpu-8g.toml")),
    ("cpu", include_str!("../hardware/clusters/cpu.toml")),
    ("dgx-a100", include_str!("../hardware/clusters/dgx-a100.toml")),
    ("dgx-a100-40gb", include_str!("../hardware/clusters/dgx-a100-40gb.toml")),
    ("dgx-b200", include_str!("../hardware/clusters/dgx-b200.toml")),
    ("dgx-b300", include_str!("../hardware/clusters/dgx-b300.toml")),
    ("dgx-h100", include_str!("../hardware/clusters/dgx-h100.toml")),
    ("dgx-h200", include_str!("../hardware/clusters/dgx-h200.toml")),
    ("dgx1-v100-32gb", include_str!("../hardware/clusters/dgx1-v100-32gb.toml")),
    ("g4dn.12xlarge", include_str!("../hardware/clusters/g4dn.12xlarge.toml")),
    ("g5.48xlarge", include_str!("../hardware/clusters/g5.48xlarge.toml")),
    ("gb200-nvl72", include_str!("../hardware/clusters/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("../hardware/clusters/gb300-nvl72.toml")),
    ("l40s-pcie", include_str!("../hardware/clusters/l40s-pcie.toml")),
    ("mi250x-node", include_str!("../hardware/clusters/mi250x-node.toml")),
    ("nd-mi300x-v5", include_str!("../hardware/clusters/nd-mi300x-v5.toml")),
    ("ndm-a100-v4", include_str!("../hardware/clusters/ndm-a100-v4.toml")),
    ("p3.16xlarge", include_str!("../hardware/clusters/p3.16xlarge.toml")),
    ("p3.8xlarge", include_str!("../hardware/clusters/p3.8xlarge.toml")),
    ("p4d.24xlarge", include_str!("../hardware/clusters/p4d.24xlarge.toml")),
    ("p5.48xlarge", include_str!("../hardware/clusters/p5.48xlarge.toml")),
    ("p5en.48xlarge", include_str!("../hardware/clusters/p5en.48xlarge.toml")),
    ("p6-b200.48xlarge", include_str!("../hardware/clusters/p6-b200.48xlarge.toml")),
    ("rtx-4090-pcie", include_str!("../hardware/clusters/rtx-4090-pcie.toml")),
    ("torchtitan-h100", include_str!("../hardware/clusters/torchtitan-h100.toml")),
];

const DEVICES: &str = include_str!("../hardware/devices.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    devices: Vec<Device>,
}

static LIBRARY: LazyLock<Result<Vec<Device>, ClusterError>> = LazyLock::new(|| {
    let origin = "embedded hardware/devices.toml";
    let file: DeviceFile =
        toml::from_str(DEVICES).map_err(|e| ClusterError::Parse { origin: origin.into(), reason: e.to_string() })?;
    let problems: Vec<_> = file.devices.iter().flat_map(|d| device_problems(&d.name, d)).collect();
    if problems.is_empty() { Ok(file.devices) } else { Err(ClusterError::Invalid { origin: origin.into(), problems }) }
});

/// The embedded devices.
pub fn devices() -> Result<&'static [Device], ClusterError> {
    LIBRARY.as_deref().map_err(Clone::clone)
}

/// The names of the embedded clusters.
pub fn names() -> impl Iterator<Item = &'static str> {
    CLUSTERS.iter().map(|(name, _)| *name)
}

/// Where a cluster comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The library.
    Embedded,
    /// A cluster file, with this text.
    File(String),
    /// The output of `nvidia-smi topo -m`, of which this cluster file was made.
    Matrix(String),
}

impl Origin {
    /// The text of the cluster file, unless it is embedded.
    pub fn text(self) -> Option<String> {
        match self {
            Origin::Embedded => None,
            Origin::File(text) | Origin::Matrix(text) => Some(text),
        }
    }
}

impl Cluster {
    /// A cluster by the name of an embedded one, or from a file. One node is in use: see [`Cluster::with_gpus`].
    ///
    /// A name wins over a file of the same name; write `./name` for the file.
    pub fn load(name_or_path: &str) -> Result<Cluster, ClusterError> {
        Ok(Cluster::load_with(name_or_path, None)?.0)
    }

    /// The same, and where it comes from. A file may also hold the output of
    /// `nvidia-smi topo -m` ([`crate::nvidia_smi`]); `device` says which GPUs that is of, where the file does not.
    pub fn load_with(name_or_path: &str, device: Option<&str>) -> Result<(Cluster, Origin), ClusterError> {
        let no_device = |cluster: &str| match device {
            Some(d) => Err(ClusterError::Device { cluster: cluster.into(), device: d.into() }),
            None => Ok(()),
        };
        if let Some(text) = Cluster::definition(name_or_path) {
            no_device(name_or_path)?;
            return Ok((Cluster::parse(text, &format!("embedded cluster {name_or_path}"))?, Origin::Embedded));
        }
        let path = Path::new(name_or_path);
        if path.exists() {
            let text = std::fs::read_to_string(path)
                .map_err(|e| ClusterError::Read { path: path.into(), reason: e.to_string() })?;
            if nvidia_smi::is_topology(&text) {
                let text = nvidia_smi::cluster(&text, name_or_path, device, devices()?)?.to_toml()?;
                return Ok((Cluster::parse(&text, name_or_path)?, Origin::Matrix(text)));
            }
            no_device(name_or_path)?;
            return Ok((Cluster::parse(&text, name_or_path)?, Origin::File(text)));
        }
        Err(ClusterError::Unknown {
            name: name_or_path.into(),
            suggestion: closest(name_or_path),
            known: names().map(String::from).collect(),
        })
    }

    /// The file of a cluster of the library; other names are files themselves.
    pub fn definition(name: &str) -> Option<&'static str> {
        CLUSTERS.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
    }

    /// A cluster from the text of a file; `origin` names it in errors.
    pub fn parse(text: &str, origin: &str) -> Result<Cluster, ClusterError> {
        let file: ClusterFile = toml::from_str(text)
            .map_err(|e| ClusterError::Parse { origin: origin.into(), reason: e.to_string().trim_end().into() })?;
        file.resolve(origin, devices()?)
    }
}

/// The known name that differs least, if it differs by less than half.
fn closest(name: &str) -> Option<String> {
    let wanted = name.to_lowercase();
    let (distance, best) = names().map(|n| (edit_distance(&wanted, n), n)).min()?;
    (distance * 2 < best.len()).then(|| best.to_string())
}

/// Levenshtein distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let next = (diagonal + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()]
}
