//! Memory: what a rank may allocate, and how its use is reported.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::Cluster;
use crate::units::Bytes;

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// Parameters in compute precision.
    Weights,
    /// Gradients, accumulated over micro-batches.
    Gradients,
    /// Optimizer state, master weights included.
    Optimizer,
    /// Values alive at the peak, KV caches included.
    Activations,
    /// Buffers of collectives, and gathered parameters.
    Communication,
    /// Scratch of kernels.
    Workspace,
    /// Context of the device runtime and of the communicators, and fragmentation.
    Reserve,
}

impl Category {
    /// Every category, in reporting order.
    pub const ALL: [Category; 7] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Communication,
        Category::Workspace,
        Category::Reserve,
    ];
    /// As shown.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Communication => "communication",
            Category::Workspace => "workspace",
            Category::Reserve => "reserve",
        }
    }
}

/// The memory of a rank by category, at one moment (the peak).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct MemoryBreakdown(pub BTreeMap<Category, Bytes>);

impl MemoryBreakdown {
    /// Adds to a category.
    pub fn add(&mut self, category: Category, bytes: Bytes) {
        *self.0.entry(category).or_default() += bytes;
    }
    /// What a category takes.
    pub fn get(&self, category: Category) -> Bytes {
        self.0.get(&category).copied().unwrap_or_default()
    }
    /// All categories together.
    pub fn total(&self) -> Bytes {
        self.0.values().copied().sum()
    }
    /// All categories but the reserve: to be compared with [`Cluster::usable_memory`].
    pub fn allocated(&self) -> Bytes {
        self.total() - self.get(Category::Reserve)
    }
}

impl fmt::Display for MemoryBreakdown {
    /// `31.2 GiB: weights 12 GiB, optimizer 19.2 GiB`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.total())?;
        let mut lead = ": ";
        for (category, bytes) in self.0.iter().filter(|(_, b)| b.0 > 0) {
            write!(f, "{lead}{} {bytes}", category.name())?;
            lead = ", ";
        }
        Ok(())
    }
}

impl Cluster {
    /// What the device's runtime, the communicators and fragmentation take: not available to a program's arena.
    pub fn reserved_memory(&self) -> Bytes {
        Bytes((self.device.reserve_gib.value * (1u64 << 30) as f64) as u64)
    }
    /// The memory of a device.
    pub fn memory_capacity(&self) -> Bytes {
        self.device.capacity()
    }
    /// What a rank may allocate: capacity less [`reserved_memory`](Self::reserved_memory).
    pub fn usable_memory(&self) -> Bytes {
        self.memory_capacity() - self.reserved_memory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakdown_sums_and_shows() {
        let mut m = MemoryBreakdown::default();
        m.add(Category::Weights, Bytes::gib(1));
        m.add(Category::Weights, Bytes::gib(2));
        m.add(Category::Reserve, Bytes::mib(512));
        m.add(Category::Workspace, Bytes::ZERO);
        assert_eq!(m.to_string(), "3.5 GiB: weights 3 GiB, reserve 512 MiB");
        assert_eq!(m.allocated(), Bytes::gib(3));
    }
}
