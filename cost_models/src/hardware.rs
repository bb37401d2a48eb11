//! What a cluster is made of: devices, and tiers of links between them; read from TOML.
//!
//! [`ClusterFile`] is the file as users write it (its JSON Schema: [`ClusterFile::json_schema`]); [`Cluster`] is
//! the validated result, for a given number of GPUs. Bandwidths are per direction and per device, in decimal units
//! (1 GB = 1e9 bytes) as vendors state them.
//!
//! Every figure may carry the source it comes from: `memory_gib = 80` or `memory_gib = { value = 80, source = "..." }`.
//! Embedded files always do (held by a test).
//!
//! Read next: [`crate::library`] for names and loading, [`crate::topology`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::collective::CollectiveKind;
use crate::compute::Coefficients;
use crate::error::{ClusterError, Problem};
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond};

/// A number and where it comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "FigureForm")]
#[schemars(with = "FigureForm")]
pub struct Figure {
    /// The number, in the unit that the key names.
    pub value: f64,
    /// A citation, or the name of an entry of `[sources]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// The two ways of writing a figure.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum FigureForm {
    /// `80`
    Bare(f64),
    /// `{ value = 80, source = "..." }`
    Full(FullFigure),
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FullFigure {
    /// The number.
    value: f64,
    /// Where it comes from.
    #[serde(default)]
    source: Option<String>,
}

impl From<FigureForm> for Figure {
    fn from(form: FigureForm) -> Figure {
        match form {
            FigureForm::Bare(value) => Figure { value, source: None },
            FigureForm::Full(FullFigure { value, source }) => Figure { value, source },
        }
    }
}

impl Figure {
    /// A figure without a source.
    pub fn bare(value: f64) -> Figure {
        Figure { value, source: None }
    }
}

/// Peak rates of arithmetic of one number format, in TFLOP/s.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// Without structured sparsity: what predictions use.
    pub dense_tflops: f64,
    /// With 2:4 structured sparsity, as data sheets like to print. Never used by predictions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparse_tflops: Option<f64>,
    /// Where they come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// Number formats with a peak of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// IEEE double.
    Fp64,
    /// IEEE single, on the vector units.
    Fp32,
    /// Single with 10 bits of mantissa, on the matrix units.
    Tf32,
    /// IEEE half.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8-bit floats.
    Fp8,
    /// 4-bit floats.
    Fp4,
}

impl Format {
    /// As in the files.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Fp64 => "fp64",
            Format::Fp32 => "fp32",
            Format::Tf32 => "tf32",
            Format::Fp16 => "fp16",
            Format::Bf16 => "bf16",
            Format::Fp8 => "fp8",
            Format::Fp4 => "fp4",
        }
    }
}

/// Generation of a device: which coefficients of the compute model apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// NVIDIA V100.
    Volta,
    /// NVIDIA T4.
    Turing,
    /// NVIDIA A100, A10.
    Ampere,
    /// NVIDIA L40, RTX 40.
    Ada,
    /// NVIDIA H100, H200.
    Hopper,
    /// NVIDIA B200, B300, GB200.
    Blackwell,
    /// AMD MI200.
    Cdna2,
    /// AMD MI300.
    Cdna3,
    /// A share of a host's cores.
    Cpu,
}

/// A device: what one rank computes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name, as plans print it.
    pub name: String,
    /// Its generation.
    pub architecture: Architecture,
    /// Independent multiprocessors (SM, CU, or cores): for wave quantisation.
    pub processors: Figure,
    /// Peaks by number format.
    pub peak: BTreeMap<Format, Peak>,
    /// Memory that the driver reports to programs, GiB: a little less than the nominal size, whose "GB" are binary on most GPUs.
    pub memory_gib: Figure,
    /// Bandwidth of that memory, GB/s.
    pub memory_bandwidth_gb_s: Figure,
    /// What is not available to a program: runtime context, communicators, fragmentation. GiB.
    #[serde(default = "default_reserve")]
    pub reserve_gib: Figure,
    /// Largest matrix product rate measured by others, as a fraction of the dense peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_efficiency: Option<Figure>,
    /// How near to its peaks it gets; without, as its architecture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Coefficients>,
    /// What a reader should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// CUDA context (about 0.5 GB), NCCL channels and buffers (about 1 GB) and allocator fragmentation.
fn default_reserve() -> Figure {
    Figure { value: 2.0, source: Some("default: context 0.5, NCCL 1, fragmentation 0.5".into()) }
}

impl Device {
    /// Memory.
    pub fn capacity(&self) -> Bytes {
        Bytes((self.memory_gib.value * (1u64 << 30) as f64) as u64)
    }
    /// Bandwidth of its memory.
    pub fn bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond(self.memory_bandwidth_gb_s.value * 1e9)
    }
    /// The dense peak in a format; None when the device has no unit for it.
    pub fn dense_peak(&self, format: Format) -> Option<FlopsPerSecond> {
        self.peak.get(&format).map(|p| FlopsPerSecond(p.dense_tflops * 1e12))
    }
}

/// Technology of a link: which latencies of the collective model apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// NVLink through switches: every pair at full rate.
    Nvswitch,
    /// NVLink or xGMI from device to device: a pair has a share of the rate.
    Mesh,
    /// PCI Express, through the host.
    Pcie,
    /// RDMA network: InfiniBand, RoCE, EFA.
    Rdma,
    /// TCP over Ethernet.
    Tcp,
    /// Memory of the host: ranks are threads.
    Memory,
}

/// One level of the network, a domain of `devices` devices that reach each other over `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// As shown: `nvlink`, `pcie`, `network`.
    pub name: String,
    /// Technology.
    pub kind: LinkKind,
    /// Devices in one domain; absent on the outermost tier: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<usize>,
    /// Nominal bandwidth per direction and device, GB/s, all devices active.
    pub bandwidth_gb_s: Figure,
    /// What groups smaller than the domain reach, where that is less ([`LinkKind::Mesh`]): ascending, the first entry with at least
    /// as many members counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupBandwidth>,
    /// What a device sends while all exchange with all, GB/s, where that is less: not all pairs are joined directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_to_all_gb_s: Option<Figure>,
    /// The fraction of it that large collectives reach.
    pub efficiency: Figure,
    /// Time that crossing this tier once adds, us, on top of what the technology's protocols cost.
    #[serde(default = "no_latency")]
    pub latency_us: Figure,
    /// Reductions done by the switches (NVLS), where the hardware has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_switch: Option<InSwitch>,
    /// What collectives inside one domain were measured to take: holds instead of the model.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measured: BTreeMap<CollectiveKind, MeasuredCollective>,
}

/// A collective, measured: a latency for every doubling of the group, and what a rank sends (in a ring, or pairwise) at a rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCollective {
    /// For every doubling of the group, us.
    pub latency_us: f64,
    /// Per rank, GB/s.
    pub bandwidth_gb_s: f64,
    /// Where they come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// The bandwidth of a group inside one domain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupBandwidth {
    /// Up to that many members.
    pub members: usize,
    /// Nominal bandwidth per direction and device, GB/s.
    pub bandwidth_gb_s: Figure,
}

fn no_latency() -> Figure {
    Figure { value: 0.0, source: Some("default: protocol latencies only".into()) }
}

/// Reductions and multicast in the switches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InSwitch {
    /// The fraction of the nominal bandwidth that each device's link sustains.
    pub efficiency: Figure,
    /// Smaller groups use rings.
    pub min_devices: Figure,
}

impl Tier {
    /// Nominal bandwidth per direction and device.
    pub fn bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond(self.bandwidth_gb_s.value * 1e9)
    }
    /// What large collectives of `members` devices in one domain reach of it.
    pub fn effective_bandwidth(&self, members: usize) -> BytesPerSecond {
        let group = self.groups.iter().find(|g| g.members >= members);
        let nominal =
            group.map_or(self.bandwidth_gb_s.value, |g| g.bandwidth_gb_s.value.min(self.bandwidth_gb_s.value));
        BytesPerSecond(nominal * 1e9 * self.efficiency.value)
    }
}

/// A cluster as its file states it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Its name, as plans record it.
    pub name: String,
    /// One line for lists.
    pub title: String,
    /// The device of every rank: of the library, or described under `[[devices]]`.
    pub device: String,
    /// Devices that the library does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// Devices of one node: the unit of allocation.
    pub devices_per_node: usize,
    /// How many nodes there are, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_nodes: Option<usize>,
    /// Links, innermost first.
    pub tier: Vec<Tier>,
    /// Citations that figures refer to by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// A cluster of a given number of devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cluster {
    /// Its name.
    pub name: String,
    /// One line for lists.
    pub title: String,
    /// The device of every rank.
    pub device: Device,
    /// Devices of one node.
    pub devices_per_node: usize,
    /// How many nodes there are, if limited.
    pub max_nodes: Option<usize>,
    /// Links, innermost first; never empty, and the last one spans all devices.
    pub tiers: Vec<Tier>,
    /// Citations that figures refer to by name.
    pub sources: BTreeMap<String, String>,
    /// The number of devices in use: ranks.
    pub gpus: usize,
}

impl ClusterFile {
    /// The JSON Schema of cluster files.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(ClusterFile).to_value()
    }

    /// As the text of a file.
    pub fn to_toml(&self) -> Result<String, ClusterError> {
        toml::to_string(self)
            .map_err(|e| ClusterError::Parse { origin: format!("cluster {}", self.name), reason: e.to_string() })
    }

    /// Checks all figures, and resolves the device among `[[devices]]` and `library`. One node is in use.
    pub fn resolve(self, origin: &str, library: &[Device]) -> Result<Cluster, ClusterError> {
        let mut problems = Problems::default();
        let device = self.devices.iter().chain(library).find(|d| d.name == self.device);
        if device.is_none() {
            let known: Vec<&str> = self.devices.iter().chain(library).map(|d| d.name.as_str()).collect();
            problems.add(
                "device",
                format!(
                    "`{}` is not known; describe it under [[devices]], or use one of {}",
                    self.device,
                    known.join(", ")
                ),
            );
        }
        if self.name.trim().is_empty() {
            problems.add("name", "must not be empty".into());
        }
        for (i, d) in self.devices.iter().enumerate() {
            problems.device(&format!("devices[{i}]"), d);
        }
        if self.devices_per_node == 0 {
            problems.add("devices_per_node", "must be at least 1".into());
        }
        if self.max_nodes == Some(0) {
            problems.add("max_nodes", "must be at least 1; leave it out when there is no limit".into());
        }
        if self.tier.is_empty() {
            problems.add("tier", "at least one [[tier]] of links is needed".into());
        }
        let mut inner = 1;
        let mut names = BTreeSet::new();
        for (i, t) in self.tier.iter().enumerate() {
            let at = format!("tier[{i}]");
            if !names.insert(&t.name) {
                problems.add(&format!("{at}.name"), format!("`{}` is used twice", t.name));
            }
            problems.tier(&at, t);
            match t.devices {
                None if i + 1 < self.tier.len() => {
                    problems.add(&format!("{at}.devices"), "may be left out on the last tier only".into());
                }
                Some(d) if d <= 1 || d % inner != 0 || d == inner => problems.add(
                    &format!("{at}.devices"),
                    format!("is {d}, but must be a multiple of the {inner} devices of the tier inside it, and more"),
                ),
                Some(d) => inner = d,
                None => {}
            }
        }
        let whole = self.max_nodes.map(|n| n * self.devices_per_node);
        if let Some(Tier { devices: Some(d), .. }) = self.tier.last()
            && whole.is_none_or(|w| w > *d)
        {
            let n = self.tier.len() - 1;
            problems.add(
                &format!("tier[{n}].devices"),
                format!(
                    "the last tier spans {d} devices only: leave `devices` out, or set max_nodes to at most {}",
                    (d / self.devices_per_node.max(1)).max(1)
                ),
            );
        }
        match device {
            Some(device) if problems.0.is_empty() => Ok(Cluster {
                device: device.clone(),
                name: self.name,
                title: self.title,
                devices_per_node: self.devices_per_node,
                max_nodes: self.max_nodes,
                tiers: self.tier,
                sources: self.sources,
                gpus: self.devices_per_node,
            }),
            _ => Err(ClusterError::Invalid { origin: origin.into(), problems: problems.0 }),
        }
    }
}

/// Collects what is wrong.
#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, at: &str, what: String) {
        self.0.push(Problem { at: at.into(), what });
    }
    fn positive(&mut self, at: String, x: f64) {
        if !(x.is_finite() && x > 0.0) {
            self.add(&at, format!("is {x}, but must be more than 0"));
        }
    }
    fn fraction(&mut self, at: String, x: f64) {
        if !(x.is_finite() && x > 0.0 && x <= 1.0) {
            self.add(&at, format!("is {x}, but must be more than 0 and at most 1"));
        }
    }
    fn not_negative(&mut self, at: String, x: f64) {
        if !(x.is_finite() && x >= 0.0) {
            self.add(&at, format!("is {x}, but must be at least 0"));
        }
    }
    fn device(&mut self, at: &str, d: &Device) {
        self.positive(format!("{at}.processors"), d.processors.value);
        self.positive(format!("{at}.memory_gib"), d.memory_gib.value);
        self.positive(format!("{at}.memory_bandwidth_gb_s"), d.memory_bandwidth_gb_s.value);
        self.not_negative(format!("{at}.reserve_gib"), d.reserve_gib.value);
        if d.reserve_gib.value >= d.memory_gib.value {
            self.add(
                &format!("{at}.reserve_gib"),
                format!("{} GiB leave nothing of {} GiB", d.reserve_gib.value, d.memory_gib.value),
            );
        }
        if !d.peak.contains_key(&Format::Fp32) {
            self.add(&format!("{at}.peak"), "needs at least `fp32`".into());
        }
        for (format, p) in &d.peak {
            let at = format!("{at}.peak.{}", format.name());
            self.positive(format!("{at}.dense_tflops"), p.dense_tflops);
            if let Some(sparse) = p.sparse_tflops
                && (sparse.is_nan() || sparse < p.dense_tflops)
            {
                self.add(
                    &format!("{at}.sparse_tflops"),
                    format!("is {sparse}, less than the dense peak {}", p.dense_tflops),
                );
            }
        }
        if let Some(e) = &d.matmul_efficiency {
            self.fraction(format!("{at}.matmul_efficiency"), e.value);
        }
        if let Some(c) = &d.compute {
            self.compute(&format!("{at}.compute"), c);
        }
    }
    fn compute(&mut self, at: &str, c: &Coefficients) {
        for (key, x) in [
            ("matmul", c.matmul),
            ("sustained", c.sustained),
            ("attention", c.attention),
            ("conv", c.conv),
            ("stream", c.stream),
            ("gather", c.gather),
        ] {
            self.positive(format!("{at}.{key}"), x);
        }
        self.not_negative(format!("{at}.launch_us"), c.launch_us);
        self.not_negative(format!("{at}.tile_us"), c.tile_us);
        if c.tiles.is_empty() {
            self.add(&format!("{at}.tiles"), "needs at least one tile of matrix products".into());
        }
        for (i, t) in c.tiles.iter().enumerate() {
            self.fraction(format!("{at}.tiles[{i}].rate"), t.rate);
            if t.m == 0 || t.n == 0 {
                self.add(&format!("{at}.tiles[{i}]"), "needs m and n of at least 1".into());
            }
        }
        c.half_gb_s.iter().for_each(|x| self.positive(format!("{at}.half_gb_s"), *x));
        for (name, cost) in &c.operators {
            let at = format!("{at}.operators.{name}");
            self.not_negative(format!("{at}.call_us"), cost.call_us);
            for (key, rate) in [("gb_s", cost.gb_s), ("gflops", cost.gflops), ("scores_g_s", cost.scores_g_s)] {
                rate.iter().for_each(|x| self.positive(format!("{at}.{key}"), *x));
            }
            let operator = name.split(' ').next().unwrap_or_default();
            if autoshard_ir::ops::find(operator).is_none() {
                self.add(&at, "there is no such operator".into());
            }
        }
    }
    fn tier(&mut self, at: &str, t: &Tier) {
        self.positive(format!("{at}.bandwidth_gb_s"), t.bandwidth_gb_s.value);
        self.fraction(format!("{at}.efficiency"), t.efficiency.value);
        if let Some(a) = &t.all_to_all_gb_s {
            self.positive(format!("{at}.all_to_all_gb_s"), a.value);
        }
        let mut least = 1;
        for (i, g) in t.groups.iter().enumerate() {
            let at = format!("{at}.groups[{i}]");
            self.positive(format!("{at}.bandwidth_gb_s"), g.bandwidth_gb_s.value);
            if g.members <= least {
                self.add(
                    &format!("{at}.members"),
                    format!("is {}, but must be more than {least}: list groups by size", g.members),
                );
            }
            least = g.members.max(least);
        }
        self.not_negative(format!("{at}.latency_us"), t.latency_us.value);
        for (kind, m) in &t.measured {
            let at = format!("{at}.measured.{}", kind.name());
            self.not_negative(format!("{at}.latency_us"), m.latency_us);
            self.positive(format!("{at}.bandwidth_gb_s"), m.bandwidth_gb_s);
        }
        if let Some(s) = &t.in_switch {
            self.fraction(format!("{at}.in_switch.efficiency"), s.efficiency.value);
            if s.min_devices.value < 2.0 || s.min_devices.value.fract() != 0.0 {
                self.add(
                    &format!("{at}.in_switch.min_devices"),
                    format!("is {}, but must be an integer of at least 2", s.min_devices.value),
                );
            }
        }
    }
}

/// What is wrong with the figures of a device.
pub(crate) fn device_problems(at: &str, device: &Device) -> Vec<Problem> {
    let mut problems = Problems::default();
    problems.device(at, device);
    problems.0
}

impl fmt::Display for Cluster {
    /// A few lines: what it is made of.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.device;
        writeln!(f, "{}: {}", self.name, self.title)?;
        write!(f, "  device {}: {} ({} usable), {}", d.name, d.capacity(), self.usable_memory(), d.bandwidth())?;
        for format in d.peak.keys() {
            if let Some(peak) = d.dense_peak(*format) {
                write!(f, ", {} {peak}", format.name())?;
            }
        }
        writeln!(f, " dense")?;
        write!(f, "  {} per node", self.devices_per_node)?;
        if let Some(n) = self.max_nodes {
            write!(f, ", at most {n} {}", if n == 1 { "node" } else { "nodes" })?;
        }
        for t in &self.tiers {
            write!(f, "\n  tier {}", t.name)?;
            if let Some(n) = t.devices {
                write!(f, " of {n}")?;
            }
            write!(f, ": {} per device and direction, {:.0}% reached", t.bandwidth(), 100.0 * t.efficiency.value)?;
            if t.in_switch.is_some() {
                write!(f, ", reductions in the switches")?;
            }
        }
        Ok(())
    }
}

/// More than any cluster has.
const MOST_GPUS: usize = 1 << 20;

impl Cluster {
    /// The number of ranks.
    pub fn gpus(&self) -> usize {
        self.gpus
    }
    /// The number of nodes in use.
    pub fn nodes(&self) -> usize {
        self.gpus.div_ceil(self.devices_per_node)
    }
    /// The same cluster with `gpus` devices in use: a part of one node, or several whole nodes.
    pub fn with_gpus(&self, gpus: usize) -> Result<Cluster, ClusterError> {
        let per = self.devices_per_node;
        let most = self.max_nodes.map(|n| n * per);
        let reason = if gpus == 0 {
            "at least one is needed".to_string()
        } else if let Some(most) = most.filter(|m| gpus > *m) {
            format!("it has {most}")
        } else if gpus > MOST_GPUS {
            format!("at most {MOST_GPUS} can be planned for")
        } else if gpus > per && !gpus.is_multiple_of(per) {
            format!("nodes of {per} are used whole")
        } else {
            return Ok(Cluster { gpus, ..self.clone() });
        };
        let part = if per > 1 { format!("valid are 1 to {per}") } else { "valid are whole nodes of 1".into() };
        let valid = match self.max_nodes {
            Some(1) => part,
            Some(n) => format!("{part}, and multiples of {per} up to {}", n * per),
            None if gpus > MOST_GPUS => format!("{part}, and multiples of {per} up to that"),
            None if gpus > per => {
                let below = gpus / per * per;
                format!("{part}, and multiples of {per}: nearest are {below} and {}", below + per)
            }
            None => format!("{part}, and multiples of {per}"),
        };
        Err(ClusterError::Gpus { cluster: self.name.clone(), gpus, reason, valid })
    }
}
