//! Time of an operator on one device: a roofline whose efficiency depends on family, precision and shape.
//!
//! `time = max(launch floor, arithmetic, memory traffic)`, where
//! - matrix products run as tiles over the device's processors: the last wave counts whole, a tile's prologue and epilogue are paid
//!   per tile, and small results may split `k`;
//! - fused attention and convolutions reach a fraction of the peak;
//! - everything else moves bytes at a fraction of the memory's bandwidth.
//!
//! Where single operators were measured on the device ([`OperatorCost`]), as `autoshard profile` does, what was measured holds
//! instead: kernels of a CPU are bound by their own instructions, each by others.
//!
//! Coefficients by architecture, and where they come from: `coefficients/compute.toml`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use autoshard_ir::DType;
use autoshard_ir::op::{Family, Work};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hardware::{Architecture, Cluster, Device, Format};
use crate::units::{Bytes, Flops, FlopsPerSecond, Seconds};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Library {
    architecture: BTreeMap<Architecture, Coefficients>,
    #[serde(rename = "sources")]
    _sources: BTreeMap<String, String>,
}

/// How near to its peaks a device gets: of its architecture, or measured on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Least time of a kernel, queued behind others.
    pub launch_us: f64,
    /// Fraction of the dense peak of a large matrix product, where the device states none.
    pub matmul: f64,
    /// Of what an isolated product reaches, in steps that last: clocks fall under load, and caches are shared.
    pub sustained: f64,
    /// Of the dense peak, in fused attention.
    pub attention: f64,
    /// Of the dense peak, in convolutions.
    pub conv: f64,
    /// Of the memory bandwidth, streaming.
    pub stream: f64,
    /// Of the memory bandwidth, indexed rows.
    pub gather: f64,
    /// Prologue and epilogue of a tile, us.
    pub tile_us: f64,
    /// To choose from; every one is tried.
    pub tiles: Vec<Tile>,
    /// Operators that were measured on the device, by name, and variant where there are several (`Attention causal`); the others
    /// are as their family.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub operators: BTreeMap<String, OperatorCost>,
    /// For those: bytes of 16-bit floats that kernels convert to 32 bits and back, GB/s; absent: they need not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_gb_s: Option<f64>,
}

/// What an operator was measured to take: the sum of its terms, for a core does one after the other. Matrix products have their
/// tiles besides. A rate that is absent costs nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OperatorCost {
    /// A call on next to nothing.
    pub call_us: f64,
    /// Bytes read and written, GB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_s: Option<f64>,
    /// Arithmetic, GFLOP/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflops: Option<f64>,
    /// Scores of attention, 1e9/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scores_g_s: Option<f64>,
}

impl Coefficients {
    /// What was measured of an operator, of its variant if that was.
    fn operator(&self, name: &str, variant: &str) -> Option<&OperatorCost> {
        let own = if variant.is_empty() { None } else { self.operators.get(&format!("{name} {variant}")) };
        own.or_else(|| self.operators.get(name))
    }
}

/// A tile shape of matrix products.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// Its rate, relative to the best tile's.
    pub rate: f64,
}

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    // Embedded and read by every test of this file: it parses, and has every architecture.
    toml::from_str(include_str!("../coefficients/compute.toml")).expect("embedded coefficients/compute.toml")
});

/// How an operator is executed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kernel {
    /// As part of another operator's kernel: it is not launched.
    pub joins: bool,
    /// Matrix products cast their operands to this format first, where the device has units for it.
    pub products: Option<Format>,
    /// Which operator it is, where devices may have measured it.
    pub operator: Option<&'static str>,
}

impl Kernel {
    /// Of an operator, by itself.
    pub fn of(operator: &'static str) -> Kernel {
        Kernel { operator: Some(operator), ..Kernel::default() }
    }
}

impl Device {
    /// Those of the device, or of its architecture.
    pub fn coefficients(&self) -> &Coefficients {
        self.compute.as_ref().unwrap_or(&LIBRARY.architecture[&self.architecture])
    }

    /// The dense peak at which arithmetic on `dtype` runs: matrix units for 16-bit floats where the device has them, vector units for
    /// f32 (as PyTorch by default, no TF32). Types without units of their own run on wider ones.
    pub fn peak_for(&self, dtype: DType) -> FlopsPerSecond {
        let chain: &[Format] = match dtype {
            DType::F16 => &[Format::Fp16],
            DType::Bf16 => &[Format::Bf16],
            DType::F64 => &[Format::Fp64],
            _ => &[],
        };
        if let Some(peak) = chain.iter().find_map(|f| self.dense_peak(*f)) {
            return peak;
        }
        // Validation demands fp32.
        let single = self.dense_peak(Format::Fp32).unwrap_or(FlopsPerSecond(1e12));
        if dtype == DType::F64 { single * 0.5 } else { single }
    }
}

impl Cluster {
    /// How long a device takes to execute an operator once, computing in `dtype`, alone on the device.
    pub fn op_time(&self, work: &Work, dtype: DType) -> Seconds {
        self.kernel_time(work, dtype, Kernel::default())
    }

    /// The same for a way of executing it.
    pub fn kernel_time(&self, work: &Work, dtype: DType, kernel: Kernel) -> Seconds {
        let c = self.device.coefficients();
        let peak = self.device.peak_for(dtype);
        let launch = if kernel.joins { Seconds::ZERO } else { Seconds::micros(c.launch_us) };
        if let Some(cost) = kernel.operator.and_then(|name| c.operator(name, work.variant)) {
            return self.measured_time(work, dtype, kernel, cost);
        }
        let flops = Flops(work.flops);
        let (arithmetic, streaming) = match work.family {
            Family::Free => return Seconds::ZERO,
            Family::MatMul => {
                let narrow = kernel.products.and_then(|f| self.device.dense_peak(f)).filter(|_| dtype.is_float());
                // Scaled casts of both operands: 16 bits read, 8 or fewer written.
                let cast = match (narrow, work.gemm) {
                    (Some(_), Some([batch, m, n, k])) => {
                        Bytes((3 * batch * k * (m + n)) as u64) / (self.device.bandwidth() * c.stream)
                    }
                    _ => Seconds::ZERO,
                };
                (self.matmul_time(work, narrow.unwrap_or(peak), c) + cast, c.stream)
            }
            Family::Conv => (flops / (peak * c.conv), c.stream),
            Family::Attention => (flops / (peak * c.attention), c.stream),
            // Vector units: a few operations per byte never bind, but transcendental-heavy chains on slow devices do.
            Family::Memory => (flops / self.device.peak_for(DType::F32), c.stream),
            Family::Gather => (flops / self.device.peak_for(DType::F32), c.gather),
        };
        let traffic = Bytes(work.bytes.max(0.0) as u64) / (self.device.bandwidth() * streaming);
        arithmetic.max(traffic).max(launch)
    }

    fn measured_time(&self, work: &Work, dtype: DType, kernel: Kernel, cost: &OperatorCost) -> Seconds {
        let c = self.device.coefficients();
        let at = |amount: f64, rate: Option<f64>| Seconds(rate.map_or(0.0, |r| amount / (r * 1e9)));
        let products = match work.family {
            Family::Free => return Seconds::ZERO,
            Family::MatMul => self.matmul_time(work, self.device.peak_for(dtype), c),
            _ => Seconds::ZERO,
        };
        let half = if matches!(dtype, DType::F16 | DType::Bf16) { c.half_gb_s } else { None };
        let call = if kernel.joins { Seconds::ZERO } else { Seconds::micros(cost.call_us) };
        let terms = at(work.bytes, cost.gb_s) + at(work.flops, cost.gflops) + at(work.scores, cost.scores_g_s);
        call + products + terms + at(work.bytes, half)
    }

    /// Tiles over processors, in whole waves; the best of the tile shapes and splits of `k`.
    fn matmul_time(&self, work: &Work, peak: FlopsPerSecond, c: &Coefficients) -> Seconds {
        let efficiency = self.device.matmul_efficiency.as_ref().map_or(c.matmul, |f| f.value) * c.sustained;
        let Some([batch, m, n, k]) = work.gemm else {
            return Flops(work.flops) / (peak * efficiency);
        };
        let processors = self.device.processors.value;
        let per_processor = peak * (efficiency / processors);
        let mut best = Seconds(f64::INFINITY);
        for tile in &c.tiles {
            let tiles = (batch * m.div_ceil(tile.m) * n.div_ceil(tile.n)) as f64;
            let mut split = 1.0;
            loop {
                let waves = (tiles * split / processors).ceil().max(1.0);
                let flops = Flops(2.0 * (tile.m * tile.n) as f64 * k as f64 / split);
                let reduce = if split > 1.0 {
                    // Partial results in f32, written and read once.
                    let bytes = 8.0 * split * batch as f64 * m as f64 * n as f64;
                    Bytes(bytes as u64) / (self.device.bandwidth() * c.stream)
                } else {
                    Seconds::ZERO
                };
                let time = (flops / (per_processor * tile.rate) + Seconds::micros(c.tile_us)) * waves + reduce;
                best = best.min(time);
                if split >= 16.0 || tiles * split >= processors || k as f64 / split < 256.0 {
                    break;
                }
                split *= 2.0;
            }
        }
        best
    }
}
