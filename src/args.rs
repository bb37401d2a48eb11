//! The command line as data: one struct per command, from which clap makes the parser and the help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::failure::Failure;

/// How to split an ONNX model over a GPU cluster, and proof that the split is good.
#[derive(Debug, Parser)]
#[command(name = "autoshard", version, about, max_term_width = 110, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Decide how to split a model; writes MODEL.plan.json and prints a summary
    Plan(PlanArgs),
    /// Say why a plan is as it is, and what else was possible
    Explain(ExplainArgs),
    /// Compare two plans, in choices and in cost
    Diff(DiffArgs),
    /// Validate a plan against its model and cluster; no device needed
    Check(CheckArgs),
    /// Run a plan on virtual CPU ranks and compare with the unsharded model
    Verify(VerifyArgs),
    /// Execute a plan
    Run(RunArgs),
    /// Write a page that shows the plan in a browser
    Report(ReportArgs),
    /// Show what a model file holds: symbols, parameters, operators, blocks, what is unsupported
    Inspect(InspectArgs),
    /// List the known clusters, or show one
    Clusters(ClustersArgs),
    /// Measure this machine and write its cluster file
    Profile(ProfileArgs),
}

/// Training or inference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Forward, backward and optimizer.
    Train,
    /// Forward only.
    Infer,
}

/// Optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

/// Compute precisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    /// bfloat16 compute, f32 master weights when training.
    Bf16,
    /// IEEE half precision compute, f32 master weights when training.
    Fp16,
    /// Single precision.
    Fp32,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Toggle {
    /// Always where sizes divide.
    On,
    /// Never.
    Off,
    /// As is cheapest.
    Auto,
}

/// What `tp` splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TpSplitsArg {
    /// Rows or columns of weights, as Megatron-LM does.
    Weights,
    /// Also tokens, where gathering weights is cheaper.
    Any,
}

/// Pipeline schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    /// All forwards, then all backwards.
    Gpipe,
    /// One forward, one backward.
    #[value(name = "1f1b")]
    OneF1B,
    /// 1F1B with gradients by weights in what would be idle time (ZB-H1): for estimates.
    ZeroBubble,
}

/// What the backward pass makes anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RecomputeArg {
    /// Nothing: all that the backward pass reads is kept.
    None,
    /// Operators bound by memory, and attention scores, where that lowers the bytes kept.
    Selective,
    /// All repeated blocks, from what enters them, as far as the backward pass needs them.
    Full,
    /// All repeated blocks, each as a whole, as checkpoint functions of frameworks do: for estimates of those.
    Layers,
    /// As is fastest within memory.
    Auto,
}

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveArg {
    /// Time of a step.
    StepTime,
    /// Memory of the fullest rank.
    Memory,
}

/// `plan`
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The ONNX file
    pub model: PathBuf,
    /// Number of GPUs
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub gpus: usize,
    /// Where to write the plan [default: MODEL.plan.json]
    #[arg(short, long, value_name = "PLAN.json")]
    pub output: Option<PathBuf>,
    /// Print the plan as JSON on stdout instead of a summary
    #[arg(long)]
    pub json: bool,
    /// Do not show progress
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub search: SearchArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub execution: ExecutionArgs,
}

/// What is to be computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Cluster by name (see `autoshard clusters`), or a file: TOML, or the output of `nvidia-smi topo -m` and `nvidia-smi -L`
    /// [default: dgx-h100]
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: Option<String>,
    /// Which GPUs the output of `nvidia-smi topo -m` is of, where the file does not say: a device of the library
    #[arg(long, value_name = "NAME", requires = "cluster")]
    pub device: Option<String>,
    /// Training step or inference [default: train if the model has a loss]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Samples per step over all GPUs [default: 8 per GPU for training, 1 per GPU for inference]
    #[arg(long, value_name = "B", allow_negative_numbers = true)]
    pub global_batch: Option<usize>,
    /// Size of a symbolic dim; repeat for several
    #[arg(long, value_name = "NAME=N")]
    pub dim: Vec<String>,
    /// Loss for training: `output:NAME` for a scalar output of the model, or `cross-entropy` / `mse` on its first output
    #[arg(long, value_name = "LOSS")]
    pub loss: Option<String>,
    /// Optimizer for training [default: adamw]
    #[arg(long, value_enum)]
    pub optimizer: Option<OptimizerArg>,
    /// Compute precision [default: fp32 on CPUs, else bf16]
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionArg>,
}

/// Restrictions of the search.
#[derive(Debug, Args)]
#[command(next_help_heading = "Search")]
pub struct SearchArgs {
    /// Ranks along tensor parallelism
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub tp: Option<usize>,
    /// Pipeline stages
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub pp: Option<usize>,
    /// Ranks along data parallelism
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub dp: Option<usize>,
    /// Ranks along context parallelism, which splits the sequence [default: more than 1 only where no samples are left to split]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cp: Option<usize>,
    /// Ranks that hold different experts, to which tokens travel: of those along data parallelism; an estimate [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ep: Option<usize>,
    /// ZeRO stage: 1 shards optimizer states over data (and context) parallelism, 2 gradients too, 3 parameters too
    #[arg(long, value_name = "0..3", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero: Option<u8>,
    /// Whether norms and residuals are split along the sequence over tensor parallelism
    #[arg(long, value_enum, default_value = "auto")]
    pub sequence_parallel: Toggle,
    /// What `tp` may split in matrix products
    #[arg(long, value_enum, default_value = "any")]
    pub tp_splits: TpSplitsArg,
    /// Samples of a micro-batch on one data-parallel rank
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub micro_batch: Option<usize>,
    /// Pipeline schedule
    #[arg(long, value_enum)]
    pub schedule: Option<ScheduleArg>,
    /// Activations that the backward pass computes anew instead of keeping them [default: auto when training]
    #[arg(long, value_enum)]
    pub recompute: Option<RecomputeArg>,
    /// Memory that a rank may use, in GiB [default: what the device has, less the framework's reserve]
    #[arg(long, value_name = "GiB", allow_negative_numbers = true)]
    pub memory_limit: Option<f64>,
    /// What to minimise
    #[arg(long, value_enum, default_value = "step-time")]
    pub objective: ObjectiveArg,
    /// Stop searching after so many seconds and give the best so far, with its bound
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub time_limit: Option<f64>,
    /// Relative gap at which a solution is good enough
    #[arg(long, value_name = "F", default_value_t = 0.01, allow_negative_numbers = true)]
    pub gap: f64,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub seed: u64,
}

/// How other frameworks execute a plan, for estimates of what it takes there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Execution")]
pub struct ExecutionArgs {
    /// Attention by a fused kernel, or with scores that are kept
    #[arg(long, value_enum, default_value = "fused")]
    pub attention: AttentionArg,
    /// Norms, activations and rotary embeddings as single operators, or as the graph says
    #[arg(long, value_enum, default_value = "fused")]
    pub operators: OperatorsArg,
    /// Kernels of single operators, or compiled ones
    #[arg(long, value_enum, default_value = "eager")]
    pub kernels: KernelsArg,
    /// Communication that runs beside computation
    #[arg(long, value_enum, default_value = "none")]
    pub overlap: OverlapArg,
    /// Format of matrix products
    #[arg(long, value_enum, default_value = "same")]
    pub products: ProductsArg,
    /// Interleaved parts of the model on each pipeline stage
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub chunks: usize,
}

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttentionArg {
    /// One kernel, where the graph has the form of one.
    Fused,
    /// The same, by kernels of the first generation (FlashAttention before 2), which take twice as long: for estimates.
    FusedFirst,
    /// As the graph says.
    Scores,
}

/// What an operator is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OperatorsArg {
    /// A fused form, where the graph has the form of one.
    Fused,
    /// As the graph says.
    Graph,
}

/// What a kernel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KernelsArg {
    /// One operator.
    Eager,
    /// Neighbouring operators bound by memory; products accumulate gradients.
    Compiled,
}

/// In which format products compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProductsArg {
    /// The compute precision.
    Same,
    /// 8-bit floats.
    Fp8,
    /// 4-bit floats.
    Fp4,
}

/// What overlaps with computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OverlapArg {
    /// Nothing.
    None,
    /// Communication over data parallelism.
    Data,
    /// That over tensor parallelism too.
    All,
}

/// `explain`
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The plan
    pub plan: PathBuf,
    /// Operators and states whose name, scope or type contains this
    pub op: Option<String>,
}

/// `diff`
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// One plan
    pub left: PathBuf,
    /// Another
    pub right: PathBuf,
}

/// `check`
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The plan
    pub plan: PathBuf,
}

/// Where parameters come from.
#[derive(Debug, Args)]
pub struct WeightArgs {
    /// Draw parameters at random instead of reading the model's weights
    #[arg(long)]
    pub random_weights: bool,
    /// Seed of random parameters and inputs [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

impl WeightArgs {
    /// The seed, where something is drawn at random: parameters, or inputs that are not given.
    pub fn seed(&self, inputs: Option<&PathBuf>) -> Result<u64, Failure> {
        if self.seed.is_some() && inputs.is_some() && !self.random_weights {
            return Err(Failure::usage("--seed has no effect: parameters and inputs are read from files"));
        }
        Ok(self.seed.unwrap_or(0))
    }
}

/// `verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The plan
    pub plan: PathBuf,
    /// Inputs of one step (.npz or .safetensors) [default: random]
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// Largest relative error that passes
    #[arg(long, value_name = "X", default_value_t = 1e-4, allow_negative_numbers = true)]
    pub tolerance: f64,
    /// Print the result as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub weights: WeightArgs,
}

/// `run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The plan
    pub plan: PathBuf,
    /// Inputs of every step (.npz or .safetensors) [default: random]
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// Where to write the outputs of the last step (.npz or .safetensors)
    #[arg(long, value_name = "FILE")]
    pub outputs: Option<PathBuf>,
    /// Number of steps
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub steps: usize,
    /// Write a checkpoint of all states here after the last step
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Start from a checkpoint, of any plan of the same model and optimizer; inference takes its parameters
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Write a trace for Perfetto (ui.perfetto.dev) here
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print the result as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub weights: WeightArgs,
}

/// `report`
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The plan
    pub plan: PathBuf,
    /// Where to write the page [default: PLAN with .html]
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

/// `inspect`
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The ONNX file
    pub model: PathBuf,
    /// Size of a symbolic dim, to lower the graph; repeat for several
    #[arg(long, value_name = "NAME=N")]
    pub dim: Vec<String>,
    /// Print the lowered graph as text
    #[arg(long, conflicts_with = "json")]
    pub graph: bool,
    /// Print as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// `clusters`
#[derive(Debug, Args)]
pub struct ClustersArgs {
    /// A name, or a file to show in full: TOML, or the output of `nvidia-smi topo -m`
    pub name: Option<String>,
    /// Which GPUs the output of `nvidia-smi topo -m` is of, where the file does not say
    #[arg(long, value_name = "NAME", requires = "name")]
    pub device: Option<String>,
    /// Print the JSON Schema of cluster files
    #[arg(long, conflicts_with = "name")]
    pub schema: bool,
}

/// `profile`
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Where to write the cluster file
    #[arg(short, long, value_name = "CLUSTER.toml", default_value = "cluster.toml")]
    pub output: PathBuf,
    /// Ranks that run beside each other [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ranks: Option<usize>,
    /// Print what was measured as JSON on stdout instead of a summary
    #[arg(long)]
    pub json: bool,
    /// Do not show progress
    #[arg(short, long)]
    pub quiet: bool,
}
