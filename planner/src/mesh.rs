//! Meshes: named axes over the ranks of a pipeline stage.
//!
//! The pipeline is outside: a plan has `stages` meshes of equal shape. Rank order is outermost first; the last axis is
//! contiguous, so it runs over the fastest links.

use serde::{Deserialize, Serialize};

/// A mesh axis, as an index into [`Mesh::axes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AxisId(pub u8);

/// What an axis is used for, and its name for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AxisName {
    /// Data parallelism (and ZeRO storage).
    Dp,
    /// Expert parallelism: data parallelism whose ranks hold different experts, see [`crate::routes`].
    Ep,
    /// Context parallelism: the sequence is split everywhere, keys and values are gathered for attention.
    Cp,
    /// Tensor (and sequence) parallelism.
    Tp,
}

impl AxisName {
    /// All, outermost first.
    pub const ALL: [AxisName; 4] = [AxisName::Dp, AxisName::Ep, AxisName::Cp, AxisName::Tp];

    /// Whether ranks along it have the same parameters (but for experts) and other data.
    pub const fn is_data(self) -> bool {
        matches!(self, AxisName::Dp | AxisName::Ep | AxisName::Cp)
    }
    /// Whether ranks along it have other samples.
    pub const fn is_samples(self) -> bool {
        matches!(self, AxisName::Dp | AxisName::Ep)
    }
    /// As shown: `dp`, `ep`, `cp`, `tp`.
    pub const fn name(self) -> &'static str {
        match self {
            AxisName::Dp => "dp",
            AxisName::Ep => "ep",
            AxisName::Cp => "cp",
            AxisName::Tp => "tp",
        }
    }
}

/// An axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MeshAxis {
    /// Its use.
    pub name: AxisName,
    /// The number of ranks along it; at least 1.
    pub size: usize,
}

/// The mesh of one stage: axes, outermost first. Axes of size 1 are left out.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Mesh {
    /// The axes.
    pub axes: Vec<MeshAxis>,
}

impl Mesh {
    /// A mesh of these axes, without those of size 1.
    pub fn new(axes: impl IntoIterator<Item = (AxisName, usize)>) -> Mesh {
        Mesh { axes: axes.into_iter().filter(|a| a.1 > 1).map(|(name, size)| MeshAxis { name, size }).collect() }
    }
    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|a| a.size).product()
    }
    /// All axes.
    pub fn ids(&self) -> impl Iterator<Item = AxisId> + use<> {
        (0..self.axes.len() as u8).map(AxisId)
    }
    /// The axis of that id.
    pub fn axis(&self, id: AxisId) -> MeshAxis {
        self.axes[id.0 as usize]
    }
    /// The size of an axis.
    pub fn size(&self, id: AxisId) -> usize {
        self.axes[id.0 as usize].size
    }
    /// The axis of that name.
    pub fn find(&self, name: AxisName) -> Option<AxisId> {
        self.axes.iter().position(|a| a.name == name).map(|i| AxisId(i as u8))
    }
    /// The ranks along the axis of that name; 1 where there is none.
    pub fn along(&self, name: AxisName) -> usize {
        self.find(name).map_or(1, |a| self.size(a))
    }
    /// The ranks that have different samples: along `dp` and `ep`.
    pub fn data_parallel(&self) -> usize {
        self.axes.iter().filter(|a| a.name.is_samples()).map(|a| a.size).product()
    }
    /// The distance in ranks between neighbours along an axis.
    pub fn stride(&self, id: AxisId) -> usize {
        self.axes[id.0 as usize + 1..].iter().map(|a| a.size).product()
    }
}

/// All divisors of a number, in order; of 0 none.
pub fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..).take_while(|d| d * d <= n).filter(|d| n % d == 0).collect();
    let large = small.iter().rev().filter(|d| **d * **d != n).map(|d| n / d);
    small.iter().copied().chain(large).collect()
}
