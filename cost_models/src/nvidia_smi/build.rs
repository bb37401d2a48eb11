//! From the matrix to a cluster: which device, which tiers.

use crate::error::ClusterError;
use crate::hardware::{Architecture, Cluster, ClusterFile, Device, Figure, GroupBandwidth, LinkKind, Tier};

use super::parse::{Link, Topology, topology};

/// A cluster of one node, from the text. `device` names a device of the library; without, the text must name its GPUs.
pub fn cluster(
    text: &str,
    origin: &str,
    device: Option<&str>,
    library: &[Device],
) -> Result<ClusterFile, ClusterError> {
    let topology = topology(text, origin)?;
    let error = |reason: String| ClusterError::Topology { origin: origin.into(), reason };
    let known = || library.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
    let device = match device {
        Some(name) => library
            .iter()
            .find(|d| d.name == name)
            .ok_or_else(|| error(format!("there is no device `{name}`; known are {}", known())))?,
        None => of_names(&topology, library).map_err(|why| error(format!("{why}; known devices are {}", known())))?,
    };
    let (tiers, notes) = tiers(&topology, device).map_err(error)?;
    let n = topology.gpus();
    let shown = std::path::Path::new(origin).file_stem().map_or(origin.into(), |s| s.to_string_lossy().into_owned());
    let notes = notes.iter().map(|n| format!("; {n}")).collect::<String>();
    Ok(ClusterFile {
        name: shown,
        title: format!("{n} x {} as `nvidia-smi topo -m` shows them, one node{notes}", device.name),
        device: device.name.clone(),
        devices: Vec::new(),
        devices_per_node: n,
        max_nodes: Some(1),
        tier: tiers,
        sources: Default::default(),
    })
}

/// Words of a name that say what it is: `NVIDIA A100-SXM4-80GB` has A100, SXM4 and 80GB.
fn parts(name: &str) -> Vec<String> {
    let upper = name.to_uppercase();
    let words = upper.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    words
        .filter(|w| !["NVIDIA", "TESLA", "GEFORCE", "GRAPHICS", "DEVICE", "HBM3", "HBM3E"].contains(w))
        .map(String::from)
        .collect()
}

/// The GB of memory in a name.
fn size(parts: &[String]) -> Option<f64> {
    parts.iter().find_map(|p| p.strip_suffix("GB")?.parse().ok())
}

/// The device whose name the GPUs have: the same model and form, and the nearest memory.
fn of_names<'a>(topology: &Topology, library: &'a [Device]) -> Result<&'a Device, String> {
    let Some(name) = topology.names.first() else {
        return Err("the matrix does not say which GPUs these are: append the output of `nvidia-smi -L` to the file, or give --device NAME".into());
    };
    if let Some(other) = topology.names.iter().find(|n| *n != name) {
        return Err(format!("GPUs differ (`{name}` and `{other}`): a cluster has one kind of device"));
    }
    let wanted = parts(name);
    // The model is the first part that has both a letter and a digit, or a number (`RTX 4090`).
    let model = |p: &[String]| -> Option<String> {
        let digit = |w: &&String| w.chars().any(|c| c.is_ascii_digit()) && !w.ends_with("GB");
        p.iter().find(digit).cloned()
    };
    let form = |p: &[String]| p.iter().find(|w| w.starts_with("SXM") || *w == "PCIE").map(|w| w[..3].to_string());
    let gib = topology.memory_mib.first().map(|m| *m as f64 / 1024.0);
    let mut found: Vec<(f64, &Device)> = library
        .iter()
        .filter_map(|d| {
            let own = parts(&d.name);
            let same = model(&own)? == model(&wanted)?;
            let forms = form(&own).zip(form(&wanted)).is_none_or(|(a, b)| a == b);
            let off = match (size(&own), size(&wanted), gib) {
                (Some(a), Some(b), _) => (a - b).abs() / b,
                (_, _, Some(b)) => (d.memory_gib.value - b).abs() / b,
                _ => 0.0,
            };
            (same && forms && off < 0.1).then_some((off, d))
        })
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    match found[..] {
        [] => Err(format!("`{name}` is not among the known devices: give --device with the one that is most like it")),
        [(a, x), (b, y), ..] if a == b => Err(format!(
            "`{name}` may be {} or {}: give --device, or append `nvidia-smi --query-gpu=name,memory.total --format=csv`",
            x.name, y.name
        )),
        [(_, d), ..] => Ok(d),
    }
}

/// A cluster of the library whose NVLinks are of the architecture's generation, and how many links each of its GPUs has.
fn reference(a: Architecture) -> Option<(&'static str, u32)> {
    match a {
        Architecture::Volta => Some(("dgx1-v100-32gb", 6)),
        Architecture::Ampere => Some(("dgx-a100", 12)),
        Architecture::Hopper => Some(("dgx-h100", 18)),
        Architecture::Blackwell => Some(("dgx-b200", 18)),
        _ => None,
    }
}

/// GB/s of a PCIe x16 slot and direction, and the source.
fn pcie(a: Architecture) -> (f64, &'static str) {
    match a {
        Architecture::Volta | Architecture::Turing => (15.75, "vendor documentation: PCI Express 3.0 x16"),
        Architecture::Hopper | Architecture::Blackwell => (63.0, "vendor documentation: PCI Express 5.0 x16"),
        _ => (31.5, "vendor documentation: PCI Express 4.0 x16"),
    }
}

/// The parts of GPUs that are joined by links for which `joins` holds, directly or through others.
fn domains(t: &Topology, joins: impl Fn(Link) -> bool) -> Vec<Vec<usize>> {
    let mut left: Vec<usize> = (0..t.gpus()).collect();
    let mut found = Vec::new();
    while !left.is_empty() {
        let mut members = vec![left.remove(0)];
        let mut next = 0;
        while let Some(&at) = members.get(next) {
            let (near, far) = left.iter().partition(|j| t.links[at][**j].is_some_and(&joins));
            members.extend::<Vec<usize>>(near);
            left = far;
            next += 1;
        }
        members.sort_unstable();
        found.push(members);
    }
    found
}

/// The size of domains that are all alike and hold neighbours; an error says why they make no tier.
fn even(domains: &[Vec<usize>]) -> Result<usize, String> {
    let size = domains.first().map_or(0, Vec::len);
    let show = |d: &[usize]| d.iter().map(|g| format!("GPU{g}")).collect::<Vec<_>>().join(" ");
    if let Some(other) = domains.iter().find(|d| d.len() != size) {
        return Err(format!(
            "{} ({}) and {} ({}) are not of one size",
            show(&domains[0]),
            size,
            show(other),
            other.len()
        ));
    }
    for d in domains {
        if d.windows(2).any(|w| w[1] != w[0] + 1) {
            return Err(format!("{} are not neighbours", show(d)));
        }
    }
    Ok(size)
}

/// Tiers, innermost first, and what was left out.
fn tiers(t: &Topology, device: &Device) -> Result<(Vec<Tier>, Vec<String>), String> {
    let n = t.gpus();
    let mut tiers: Vec<Tier> = Vec::new();
    let mut notes = Vec::new();
    let bridged = |l: Link| matches!(l, Link::NvLink(_));
    let candidates: [(&str, fn(Link) -> bool); 4] = [
        ("nvlink", |l| matches!(l, Link::NvLink(_))),
        ("pcie", |l| l <= Link::Phb),
        ("numa", |l| l <= Link::Node),
        ("sockets", |_| true),
    ];
    for (name, joins) in candidates {
        let found = domains(t, joins);
        let inner = tiers.last().and_then(|t| t.devices).unwrap_or(1);
        let size = match even(&found) {
            Ok(size) => size,
            Err(why) => {
                notes.push(format!("no tier {name}: {why}, so the tier around them counts"));
                continue;
            }
        };
        if size <= inner {
            continue;
        }
        if size % inner != 0 {
            notes.push(format!("no tier {name}: its domains of {size} do not hold whole ones of {inner}"));
            continue;
        }
        tiers.push(if name == "nvlink" {
            nvlink_tier(t, device, &found)?
        } else {
            let through = match name {
                "pcie" => (0.8, "PCIe through switches or the host bridge, assumed"),
                "numa" => (0.7, "PCIe through several host bridges, assumed"),
                _ => (0.5, "PCIe and the links between sockets, which all GPUs share; assumed"),
            };
            bus(name, device, Some(size), through)
        });
    }
    if n == 1 {
        notes.push("a single GPU has no links; its tier is PCIe".into());
    }
    let any = t.links.iter().flatten().flatten().any(|l| bridged(*l));
    if any && !tiers.iter().any(|t| t.name == "nvlink") {
        notes.push("NVLinks count as PCIe".into());
    }
    if tiers.is_empty() {
        tiers.push(bus("pcie", device, None, (0.8, "PCIe through the host, assumed")));
    }
    if t.cards > 0 {
        let cards = if t.cards == 1 { "its network card".into() } else { format!("its {} network cards", t.cards) };
        notes.push(format!("{cards} left out: add a tier to plan for several nodes"));
    }
    Ok((tiers, notes))
}

/// A tier of PCI Express.
fn bus(name: &str, device: &Device, devices: Option<usize>, (efficiency, why): (f64, &str)) -> Tier {
    let (value, source) = pcie(device.architecture);
    Tier {
        name: name.into(),
        kind: LinkKind::Pcie,
        devices,
        bandwidth_gb_s: Figure { value, source: Some(source.into()) },
        groups: Vec::new(),
        all_to_all_gb_s: None,
        efficiency: Figure { value: efficiency, source: Some(why.into()) },
        latency_us: Figure { value: 0.0, source: Some("protocol latencies only".into()) },
        in_switch: None,
        measured: Default::default(),
    }
}

/// The tier of NVLinks, inside these domains of one size: rates as on a cluster of the library with such links, by their number.
fn nvlink_tier(t: &Topology, device: &Device, domains: &[Vec<usize>]) -> Result<Tier, String> {
    let size = domains[0].len();
    let (name, links) = reference(device.architecture)
        .ok_or_else(|| format!("{} has no NVLink, but the matrix has NV#: is it that device?", device.name))?;
    let of_library = Cluster::load(name).map_err(|e| e.to_string())?;
    let like = of_library.tiers[0].clone();
    let per_link = like.bandwidth_gb_s.value / f64::from(links);
    let figure = |count: f64, what: &str| Figure {
        value: count * per_link,
        source: Some(format!("{what}, of {per_link} GB/s each as {name} of the library")),
    };
    let count = |i: usize, j: usize| match t.links[i][j] {
        Some(Link::NvLink(n)) => n,
        _ => 0,
    };
    let others = |d: &[usize], i: usize| d.iter().filter(|j| **j != i).map(|j| count(i, *j)).collect::<Vec<u32>>();
    let rows: Vec<Vec<u32>> = domains.iter().flat_map(|d| d.iter().map(|i| others(d, *i))).collect();
    let all = || rows.iter().flatten().copied();
    let (fewest, most) = (all().min().unwrap_or(0), all().max().unwrap_or(0));
    let tier = Tier {
        name: "nvlink".into(),
        kind: LinkKind::Mesh,
        devices: Some(size),
        groups: Vec::new(),
        all_to_all_gb_s: None,
        in_switch: None,
        ..like.clone()
    };
    // Through switches every pair shows all links of a GPU: together more than a GPU has, if they went to each other one.
    if size > 2 && fewest == most && most * (size as u32 - 1) > links {
        let bandwidth_gb_s = figure(f64::from(most), &format!("NV{most} between all pairs, so through switches"));
        return Ok(Tier { kind: LinkKind::Nvswitch, bandwidth_gb_s, in_switch: like.in_switch, ..tier });
    }
    // From GPU to GPU: a ring uses all links of each, where the mesh has such rings; a pair has its own only.
    let least = rows.iter().map(|r| r.iter().sum::<u32>()).min().unwrap_or(0);
    let bandwidth_gb_s = figure(f64::from(least), &format!("{least} NVLinks of the GPU that has fewest"));
    let mut found = Tier { bandwidth_gb_s, ..tier };
    if size > 2 {
        let pair = all().filter(|c| *c > 0).min().unwrap_or(0);
        let bandwidth_gb_s = figure(f64::from(pair), &format!("a pair has {pair} NVLinks at least"));
        found.groups.push(GroupBandwidth { members: 2, bandwidth_gb_s });
        if fewest == 0 {
            // Pairs without a link of their own pass through another GPU or PCIe.
            let mesh = Cluster::load("dgx1-v100-32gb").map_err(|e| e.to_string())?.tiers[0].clone();
            let part = mesh.all_to_all_gb_s.map_or(0.3, |a| a.value / mesh.bandwidth_gb_s.value);
            let source = "not all pairs are joined: the same part as on dgx1-v100-32gb of the library";
            let value = part * found.bandwidth_gb_s.value;
            found.all_to_all_gb_s = Some(Figure { value, source: Some(source.into()) });
        }
    }
    Ok(found)
}
