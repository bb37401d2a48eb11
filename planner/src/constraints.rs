//! What the user pins: mesh sizes, storage, sequence parallelism, micro-batch, schedule, recomputation, memory.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::assignment::Schedule;
use crate::execution::Execution;
use crate::request::RecomputeChoice;

/// Restrictions of the search; what is absent is free.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Constraints {
    /// Ranks along `tp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp: Option<usize>,
    /// Pipeline stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp: Option<usize>,
    /// Ranks along `dp`, those along `ep` among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Ranks along `cp`; where absent, more than one only if no sample is left to split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cp: Option<usize>,
    /// Ranks along `dp` that hold different experts, to which tokens travel; more than along `dp` if those along `tp` are to hold
    /// different ones too. Where absent, none: the runtime does not execute it yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ep: Option<usize>,
    /// ZeRO stage, 0 to 3: what is sharded over `dp` (and `cp`) where sizes divide. 0 nothing, 1 optimizer states, 2 accumulated
    /// gradients too, 3 parameters too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero: Option<u8>,
    /// Whether `tp` splits the sequence where nothing else is split (norms, residuals, ...). `true`: always where sizes
    /// divide; `false`: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence_parallel: Option<bool>,
    /// Whether `tp` splits matrix products only by their weights' dims, as in Megatron-LM, and never by tokens with the weights
    /// gathered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub weights_stay: bool,
    /// Samples of one micro-batch on one data-parallel rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Order of forwards and backwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// What the backward pass makes anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<RecomputeChoice>,
    /// How steps are executed.
    #[serde(skip_serializing_if = "Execution::is_default")]
    pub execution: Execution,
    /// Bytes that a rank may allocate; at most what the device has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
}

/// What is minimised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// Time of a step (of a forward pass, for inference).
    #[default]
    StepTime,
    /// Memory of the fullest rank.
    Memory,
}
