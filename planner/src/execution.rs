//! How the program that executes a plan goes about it, as far as times and memory depend on it.
//!
//! The default is what this project's own runtime does. The rest describes other frameworks, for estimates of what they take;
//! [`Execution::only_estimate`] names what cannot be run here.

use autoshard_cost_models::hardware::Format;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether attention is a fused kernel, see [`autoshard_ir::fuse::Forms`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttentionChoice {
    /// Where the graph has the form of one; no scores are kept.
    #[default]
    Fused,
    /// Scores are made as the graph says.
    Scores,
}

/// Whether norms, activations and rotary embeddings are single operators, see [`autoshard_ir::fuse::Forms`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Operators {
    /// Where the graph has the form of one.
    #[default]
    Fused,
    /// As the graph says.
    Graph,
}

/// Whether operators bound by memory are compiled into few kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// One kernel per operator.
    #[default]
    Eager,
    /// Neighbouring operators bound by memory are one kernel, and gradients are accumulated by the product that makes them.
    Compiled,
}

/// Of which generation kernels of fused attention are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Generation {
    /// FlashAttention-2 and later: what the fitted rates are of.
    #[default]
    Second,
    /// FlashAttention and Triton's kernel of 2022: half as fast (T. Dao, FlashAttention-2, 2023: "around 2x speedup").
    First,
}

impl Generation {
    /// How much longer its kernels take.
    pub fn slowdown(self) -> f64 {
        match self {
            Generation::Second => 1.0,
            Generation::First => 2.0,
        }
    }
}

/// Which communication runs beside computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// None.
    #[default]
    None,
    /// That over data parallelism: gradients are reduced in buckets during the last backward, sharded parameters gathered ahead
    /// of use, updated ones during the next forward.
    Data,
    /// That over tensor parallelism too: products work on the parts that have arrived.
    All,
}

/// The format in which matrix products compute; everything else, and what is kept, stays in the compute precision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Products {
    /// The compute precision.
    #[default]
    Same,
    /// 8-bit floats with scales.
    Fp8,
    /// 4-bit floats with scales.
    Fp4,
}

impl Products {
    /// As devices state their peaks.
    pub fn format(self) -> Option<Format> {
        match self {
            Products::Same => None,
            Products::Fp8 => Some(Format::Fp8),
            Products::Fp4 => Some(Format::Fp4),
        }
    }
}

/// How a step is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Execution {
    /// See [`Kernels`].
    pub kernels: Kernels,
    /// See [`Generation`].
    pub attention: Generation,
    /// See [`Overlap`].
    pub overlap: Overlap,
    /// See [`Products`].
    pub products: Products,
    /// Parts of the model on each stage, interleaved (Narayanan et al. 2021, section 2.2); 1: none.
    pub chunks: usize,
}

impl Default for Execution {
    fn default() -> Execution {
        Execution {
            kernels: Kernels::default(),
            attention: Generation::default(),
            overlap: Overlap::default(),
            products: Products::default(),
            chunks: 1,
        }
    }
}

impl Execution {
    /// More chunks than any model has blocks to fill them.
    pub const MOST_CHUNKS: usize = 1024;

    /// What is wrong with it.
    pub fn problem(&self) -> Option<String> {
        let most = Execution::MOST_CHUNKS;
        (!(1..=most).contains(&self.chunks)).then(|| format!("{} chunks per stage: there are 1 to {most}", self.chunks))
    }
    /// Whether it is the default.
    pub fn is_default(&self) -> bool {
        *self == Execution::default()
    }
    /// What of it the runtime does not do, as notes for people.
    pub fn only_estimate(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.chunks > 1 {
            notes.push(format!(
                "an estimate: the interleaved schedule ({} chunks per stage) cannot be executed yet; `run` executes 1F1B",
                self.chunks
            ));
        }
        let what = match self.overlap {
            Overlap::None => None,
            Overlap::Data => Some("communication over data parallelism"),
            Overlap::All => Some("communication"),
        };
        if let Some(what) = what {
            notes.push(format!("an estimate: {what} overlaps with compute, of which the proof knows nothing; `run` does one after the other"));
        }
        if self.products != Products::Same {
            notes.push("an estimate: products compute in 8 or 4 bits; `run` computes in the compute precision".into());
        }
        if self.attention == Generation::First {
            notes.push("an estimate: attention as by kernels of the first generation, half as fast".into());
        }
        if self.kernels == Kernels::Compiled {
            notes.push(
                "an estimate: neighbouring operators bound by memory are one kernel; `run` executes one by one".into(),
            );
        }
        notes
    }
}
