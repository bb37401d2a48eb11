//! The published rows: what was measured, of which configuration, and which rows cannot be used, by rules.
//!
//! A row is a reference, never an input of a prediction: [`Case`] holds the configuration, [`Measured`] what to compare with.

use std::collections::BTreeMap;
use std::path::Path;

use autoshard_planner::execution::{AttentionChoice, Generation, Kernels, Operators, Overlap, Products};

/// The decoder that a row trains.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decoder {
    /// `gpt` or `llama`.
    pub family: &'static str,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a layer's MLP; 0 where all layers have experts.
    pub ffn: usize,
    pub vocab: usize,
    pub sequence: usize,
    /// What the columns leave to the architecture.
    pub parts: Parts,
}

/// What a model has besides the parts of every decoder. From the models' own configurations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parts {
    /// Elements of a head, where they are not hidden / heads.
    pub head_dim: Option<usize>,
    /// Norms of queries and keys.
    pub qk_norm: bool,
    /// Biases of all products but the head.
    pub biases: bool,
    /// Keys that a query sees in every other layer; 0: all.
    pub window: usize,
    /// Mixture of experts.
    pub experts: Option<Experts>,
}

/// A mixture of experts in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Experts {
    pub count: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Whether they gate as GPT-OSS's do.
    pub clamped_gate: bool,
}

/// A configuration, as its row states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub decoder: Decoder,
    /// Name in the library of clusters.
    pub cluster: &'static str,
    pub gpus: usize,
    pub precision: String,
    pub tp: usize,
    pub pp: usize,
    /// Model chunks of a stage; 1 without interleaving.
    pub chunks: usize,
    pub dp: usize,
    pub cp: usize,
    /// Ranks that hold different experts.
    pub ep: usize,
    pub zero: u8,
    pub sequence_parallel: bool,
    pub micro_batch: usize,
    pub global_batch: usize,
    pub recompute: String,
    /// How the framework of the row computes.
    pub framework: Framework,
}

/// What a framework does that no column says. From the sources' own documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Framework {
    pub attention: AttentionChoice,
    pub generation: Generation,
    pub operators: Operators,
    pub kernels: Kernels,
    pub overlap: Overlap,
    pub products: Products,
    /// Whether full recomputation runs layers again to their end.
    pub whole_layers: bool,
}

/// What a configuration was measured to take.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Row ids.
    pub ids: Vec<String>,
    /// Seconds of a step.
    pub step_s: Option<f64>,
    /// Bytes, of the fullest GPU.
    pub peak_bytes: Option<f64>,
}

/// A configuration with its measurements.
#[derive(Debug, Clone)]
pub struct Case {
    pub source: String,
    pub config: Config,
    pub measured: Measured,
}

/// All cases, and how many rows each rule excludes.
#[derive(Default)]
pub struct Published {
    pub cases: Vec<Case>,
    pub excluded: BTreeMap<&'static str, usize>,
}

type Row = BTreeMap<String, String>;

/// Reads `measurements.csv`.
pub fn read(path: &Path) -> Result<Published, csv::Error> {
    let mut found = Published::default();
    let mut cases: Vec<Case> = Vec::new();
    for row in csv::Reader::from_path(path)?.deserialize() {
        let row: Row = row?;
        match config(&row).and_then(|c| Ok((measure(&row, &c)?, c))) {
            Ok((m, config)) => {
                let known = cases.iter().position(|c| c.source == source(&row) && c.config == config);
                let at = known.unwrap_or_else(|| {
                    cases.push(Case { source: source(&row), config, measured: Measured::default() });
                    cases.len() - 1
                });
                let entry = &mut cases[at].measured;
                entry.ids.push(row["id"].clone());
                // Iteration times come before rates, which are rounded more: the first one stands.
                entry.step_s = entry.step_s.or(m.step_s);
                entry.peak_bytes = entry.peak_bytes.or(m.peak_bytes);
            }
            Err(rule) => *found.excluded.entry(rule).or_default() += 1,
        }
    }
    found.cases = cases;
    Ok(found)
}

fn source(row: &Row) -> String {
    row["id"].split(['-', '_']).next().unwrap_or_default().to_string()
}

fn number(row: &Row, column: &str) -> Option<usize> {
    row[column].parse::<usize>().ok()
}

fn config(row: &Row) -> Result<Config, &'static str> {
    let source = source(row);
    let model = row["model"].to_lowercase();
    for (word, rule) in [
        ("lora", "part of the weights is trained"),
        // Of which sizes no column speaks.
        ("deepseek", "latent attention, whose dims are not published"),
        ("tokendrop", "experts drop tokens"),
        ("resnet", "no decoder"),
        ("bert", "no decoder"),
    ] {
        if model.contains(word) {
            return Err(rule);
        }
    }
    if row["interconnect"].starts_with("het") || row["gpu"].starts_with("het") {
        return Err("several kinds of nodes");
    }
    let megatron = matches!(source.as_str(), "sc21t1" | "sc21t2" | "korth");
    let missing = "dims or parallelism not published";
    let (layers, hidden, heads) = (
        number(row, "layers").ok_or(missing)?,
        number(row, "hidden").ok_or(missing)?,
        number(row, "heads").ok_or(missing)?,
    );
    let experts = experts(&row["ffn"], &model)?;
    let parts = parts(&model, experts);
    if model.contains("moe") && experts.is_none() {
        return Err(missing);
    }
    let llama = model.contains("llama") || parts != Parts::default();
    let gpus = number(row, "gpus").ok_or(missing)?;
    let pp = number(row, "pp").ok_or(missing)?;
    let tp = number(row, "tp").ok_or(missing)?;
    let cp = number(row, "cp").unwrap_or(1);
    let dp = number(row, "dp").or((gpus % (tp * pp * cp) == 0).then(|| gpus / (tp * pp * cp))).ok_or(missing)?;
    if dp * tp * pp * cp != gpus {
        return Err("parallel sizes do not multiply to the GPUs");
    }
    let ep = number(row, "ep").unwrap_or(1);
    if experts.is_some() && row["ep"].is_empty() {
        return Err(missing);
    }
    let micro = number(row, "micro_batch");
    let global_batch = number(row, "global_batch").or(micro.filter(|_| pp == 1).map(|m| m * dp)).ok_or(missing)?;
    // These sources do not accumulate.
    let single = pp == 1 && (matches!(source.as_str(), "mlm2020" | "mcore") || row["id"].starts_with("alpa_intra"));
    let micro_batch = micro.or(single.then(|| global_batch / dp)).ok_or(missing)?;
    if micro_batch == 0 || global_batch % (dp * micro_batch) != 0 {
        return Err("micro-batches do not divide the batch");
    }
    let products = match row["precision"].to_lowercase().as_str() {
        p if p.contains("fp8") => Products::Fp8,
        p if p.contains("fp4") => Products::Fp4,
        _ => Products::Same,
    };
    let precision = match row["precision"].to_lowercase().as_str() {
        "" if source == "mcore" => "bf16",
        "" | "fp16" => "fp16",
        p if p.contains("bf16") || products != Products::Same => "bf16",
        _ => "fp32",
    };
    let recompute = match row["recompute"].as_str() {
        // Rates that count recomputation; AMP runs the pipeline scripts of DeepSpeedExamples, which checkpoint every layer.
        "" if matches!(source.as_str(), "sc21t2" | "mlm2020" | "amp") => "full",
        "full" => "full",
        "selective" => "selective",
        _ => "none",
    };
    let old = megatron || matches!(source.as_str(), "mlm2020" | "alpa" | "amp" | "mist" | "ds");
    Ok(Config {
        decoder: Decoder {
            family: if llama { "llama" } else { "gpt" },
            layers,
            hidden,
            heads,
            kv_heads: number(row, "kv_heads").unwrap_or(heads),
            ffn: if experts.is_some() { 0 } else { number(row, "ffn").unwrap_or(4 * hidden) },
            // The authors of SC'21 and of Korthikanti et al. say 51200 for all their models.
            vocab: number(row, "vocab").or(megatron.then_some(51200)).ok_or(missing)?,
            sequence: number(row, "seq").ok_or(missing)?,
            parts,
        },
        cluster: cluster(row).ok_or("cluster not in the library")?,
        gpus,
        precision: precision.into(),
        tp,
        pp,
        chunks: number(row, "vpp").unwrap_or(1).max(1),
        dp,
        cp,
        ep,
        // Megatron Core and NeMo use the distributed optimizer.
        zero: number(row, "zero").unwrap_or(usize::from(matches!(source.as_str(), "mcore" | "bridge" | "nemo"))) as u8,
        sequence_parallel: row["sp"] == "1" || (row["sp"].is_empty() && !old && tp > 1),
        micro_batch,
        global_batch,
        recompute: recompute.into(),
        framework: Framework { products, ..framework(&source, &model) },
    })
}

/// The experts that a column `ffn` states, as in `768 per expert, 128 experts top-8`; none where it is a number or empty.
fn experts(ffn: &str, model: &str) -> Result<Option<Experts>, &'static str> {
    if !ffn.contains("expert") {
        return Ok(None);
    }
    let rule = "experts besides which a layer has others";
    let (width, rest) = ffn.split_once(" per expert, ").ok_or(rule)?;
    let (count, top_k) = rest.split_once(" experts top-").ok_or(rule)?;
    let size = |text: &str| text.parse::<usize>().map_err(|_| rule);
    let clamped_gate = model.contains("oss");
    Ok(Some(Experts { count: size(count)?, top_k: size(top_k)?, ffn: size(width)?, clamped_gate }))
}

/// What no column says of an architecture, as its authors publish it (totals of parameters agree). Qwen3: `head_dim` 128, norms of queries and keys. GPT-OSS:
/// `head_dim` 64, biases, a window of 128 in every other layer; its sinks are left out.
fn parts(model: &str, experts: Option<Experts>) -> Parts {
    match experts {
        Some(_) if model.contains("qwen3") => Parts { head_dim: Some(128), qk_norm: true, experts, ..Parts::default() },
        Some(_) if model.contains("oss") => {
            Parts { head_dim: Some(64), biases: true, window: 128, experts, ..Parts::default() }
        }
        _ => Parts { experts, ..Parts::default() },
    }
}

/// What the framework of a source does that its rows do not say; where that is documented.
fn framework(source: &str, model: &str) -> Framework {
    let graph = Framework {
        attention: AttentionChoice::Fused,
        generation: Generation::Second,
        operators: Operators::Fused,
        kernels: Kernels::Compiled,
        overlap: Overlap::Data,
        products: Products::Same,
        // PyTorch's checkpoints without re-entrance, which these use, stop when the last tensor that was asked for is there;
        // Megatron's and DeepSpeed's do not.
        whole_layers: !matches!(source, "mpt" | "titan"),
    };
    match source {
        // Narayanan et al. 2021, section 4.2, and Korthikanti et al.: fused bias, GELU, dropout and residual, masked softmax; no
        // flash attention yet; gradients are reduced after the last backward. Alpa: XLA compiles, and nothing overlaps.
        "sc21t1" | "sc21t2" | "korth" | "mlm2020" | "amp" | "alpa" | "mist" | "ds" => {
            Framework { attention: AttentionChoice::Scores, overlap: Overlap::None, ..graph }
        }
        // FSDP without compilation. Its norms and activations are single operators in GPT models.
        // Its tables say Flash Attention, and that they are yet to be updated for PyTorch 2.0: of the first generation.
        "mpt" => Framework { kernels: Kernels::Eager, generation: Generation::First, ..graph },
        "titan" if model.contains("eager") => {
            Framework { operators: Operators::Graph, kernels: Kernels::Eager, ..graph }
        }
        // "asyncTP"; Megatron Core's tp-comm-overlap.
        "titan" if model.contains("async") => Framework { overlap: Overlap::All, ..graph },
        "mcore" | "bridge" | "nemo" => Framework { overlap: Overlap::All, ..graph },
        // Compiled FSDP.
        _ => graph,
    }
}

/// The library's name of the cluster of a row.
fn cluster(row: &Row) -> Option<&'static str> {
    let (gpu, link) = (row["gpu"].as_str(), row["interconnect"].as_str());
    Some(match gpu {
        "A100-80GB-SXM" if link.contains("RoCE") => "ndm-a100-v4",
        "A100-40GB-SXM" => "dgx-a100-40gb",
        "A100-80GB-SXM" | "A100" => "dgx-a100",
        "H100-96GB-HBM2e-500W" => "torchtitan-h100",
        "H100-80GB-SXM" | "H100" => "dgx-h100",
        "B200" => "dgx-b200",
        "B300" => "dgx-b300",
        "GB200" => "gb200-nvl72",
        "GB300" => "gb300-nvl72",
        "V100-16GB-SXM2" => "p3.16xlarge",
        "V100-16GB (p3.8xlarge)" => "p3.8xlarge",
        "V100" | "V100-32GB" => "dgx1-v100-32gb",
        "T4" => "g4dn.12xlarge",
        "H200" => "dgx-h200",
        _ => return None,
    })
}

/// Seconds or bytes of a row. FLOP counts are the source's own convention.
fn measure(row: &Row, c: &Config) -> Result<Measured, &'static str> {
    let value: f64 = row["value"].parse().map_err(|_| "no number")?;
    let d = &c.decoder;
    let (b, s, l, h, v) = (c.global_batch as f64, d.sequence as f64, d.layers as f64, d.hidden as f64, d.vocab as f64);
    let gpus = c.gpus as f64;
    // Narayanan et al. (SC'21), equation 3; without recomputation 3/4 of its layers.
    let hardware = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
    // Korthikanti et al., equation 7.
    let model = 72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
    let mut m = Measured::default();
    match row["metric"].as_str() {
        "iter_time" | "iter_time_actual" => m.step_s = Some(value),
        "tokens_per_sec_per_gpu" => m.step_s = Some(b * s / (value * gpus)),
        "tflops_per_gpu_hw" => m.step_s = Some(hardware / (value * 1e12 * gpus)),
        "tflops_per_gpu_model" if source(row) == "mcore" => m.step_s = Some(model / (value * 1e12 * gpus)),
        "mfu" if source(row) == "korth" => m.step_s = Some(model / (value / 100.0 * 312e12 * gpus)),
        "peak_memory" if row["zero"].is_empty() && c.dp > 1 => {
            return Err("memory, but not what is sharded over data parallelism");
        }
        "peak_memory" | "peak_memory_actual" => {
            let unit = match row["unit"].split_whitespace().next() {
                Some("GiB") => (1u64 << 30) as f64,
                Some("MiB") => (1u64 << 20) as f64,
                Some("GB") => 1e9,
                Some("MB") => 1e6,
                _ => return Err("unit not known"),
            };
            m.peak_bytes = Some(value * unit);
        }
        "mfu" | "hfu" | "tflops_per_gpu_model" | "train_days_300B_tokens" => {
            return Err("says again what another row says");
        }
        _ => return Err("not time or memory of a step"),
    }
    Ok(m)
}
