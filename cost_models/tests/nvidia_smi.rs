//! Saved output of `nvidia-smi topo -m` becomes a cluster as recorded; what is no such output is refused with its place.

use std::path::PathBuf;

use autoshard_cost_models::nvidia_smi::{Link, cluster, is_topology, topology};
use autoshard_cost_models::{Bytes, Cluster, CollectiveKind, Group, library};

fn read(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/topologies").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The file that a user would get.
fn file(name: &str, device: Option<&str>) -> String {
    let found = cluster(&read(name), name, device, library::devices().unwrap());
    found.unwrap_or_else(|e| panic!("{e}")).to_toml().unwrap()
}

fn load(name: &str, device: Option<&str>) -> Cluster {
    Cluster::parse(&file(name, device), name).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn clusters_of_real_machines() {
    for (name, device) in [
        ("dgx-1v.txt", None),
        ("dgx-a100.txt", None),
        ("dgx-h100.txt", None),
        ("hgx-a100-4.txt", None),
        ("l40s-8.txt", None),
        ("bridged-pairs.txt", Some("A100-SXM4-80GB")),
        ("crossed-pairs.txt", Some("A100-SXM4-40GB")),
        ("uneven.txt", None),
        ("one.txt", None),
    ] {
        // It loads, too.
        load(name, device);
        insta::assert_snapshot!(name.trim_end_matches(".txt"), file(name, device));
    }
}

/// A machine that the library has takes as long by its matrix.
#[test]
fn a_known_machine_is_as_in_the_library() {
    for (name, known) in [("dgx-a100.txt", "dgx-a100"), ("dgx-h100.txt", "dgx-h100")] {
        let (found, library) = (load(name, None), Cluster::load(known).unwrap());
        assert_eq!(found.device, library.device);
        for kind in CollectiveKind::ALL {
            for size in [2, 4, 8] {
                let time = |c: &Cluster| c.collective_time(kind, Bytes(1 << 26), Group::contiguous(size));
                assert_eq!(time(&found), time(&library), "{name}: {} over {size}", kind.name());
            }
        }
    }
}

#[test]
fn a_bridge_is_faster_than_the_bus() {
    let c = load("bridged-pairs.txt", Some("A100-SXM4-80GB")).with_gpus(4).unwrap();
    let time = |stride| c.collective_time(CollectiveKind::AllReduce, Bytes(1 << 28), Group::new(2, stride)).0;
    assert!(time(2) > 5.0 * time(1), "{} across, {} over the bridge", time(2), time(1));
}

#[test]
fn cells_are_read_whatever_is_around_them() {
    let t = topology(&read("dgx-a100.txt"), "a").unwrap();
    assert_eq!((t.gpus(), t.cards, t.names.len()), (8, 10, 8));
    assert!(t.links.iter().enumerate().all(|(i, row)| row[i].is_none() && row[(i + 1) % 8] == Some(Link::NvLink(12))));
    let t = topology(&read("dgx-1v.txt"), "b").unwrap();
    assert_eq!((t.links[0][3], t.links[0][5], t.cards), (Some(Link::NvLink(2)), Some(Link::Sys), 4));
    assert!(!is_topology("name = \"mine\"\n") && !is_topology("GPU 0: Tesla T4 (UUID: x)\n"));
}

#[test]
fn errors_say_where_and_what() {
    let four = read("bridged-pairs.txt");
    let row = |i: usize| four.lines().find(|l| l.starts_with(&format!("GPU{i}\t"))).unwrap().to_string();
    let matrix: String = four.lines().filter(|l| !l.starts_with("GPU ")).map(|l| format!("{l}\n")).collect();
    let cases = [
        ("a cell that is none", four.replacen("NV12", "NVX", 1), None),
        ("no links", four.replacen("NV12", "NV0", 1), None),
        ("not symmetric", four.replacen("NV12", "NV8", 1), None),
        ("a diagonal that is not X", four.replacen(" X ", "PIX", 1), None),
        ("a row too short", four.replacen(&row(1), "GPU1\tNV12\t X ", 1), None),
        ("a row missing", four.replacen(&format!("{}\n", row(2)), "", 1), None),
        ("cut off", four[..four.find("GPU2\tSYS").unwrap()].to_string(), None),
        ("other columns", four.replacen("\tGPU1", "\tGPU7", 1), None),
        ("names of fewer", four.lines().skip(1).map(|l| format!("{l}\n")).collect(), None),
        ("no names", matrix.clone(), None),
        ("an unknown name", four.replace("A100 80GB PCIe", "Z9"), None),
        ("names that differ", four.replacen("A100 80GB PCIe", "H100 PCIe", 1), None),
        ("a device that is not known", matrix.clone(), Some("Z9")),
        ("a device without NVLink", matrix, Some("L40S-48GB")),
        ("an ambiguous name", four.replace("A100 80GB PCIe", "A100"), None),
    ];
    let mut shown = String::new();
    for (what, text, device) in cases {
        let error = cluster(&text, "topo.txt", device, library::devices().unwrap()).unwrap_err().to_string();
        let short = error.split("known").next().unwrap_or_default();
        shown += &format!("{what}:\n  {short}\n");
    }
    insta::assert_snapshot!("errors", shown);
}

/// A device that is given for a cluster that names its own would have no effect.
#[test]
fn a_device_is_for_matrices_only() {
    let error = Cluster::load_with("dgx-h100", Some("T4-16GB")).unwrap_err().to_string();
    assert!(error.contains("dgx-h100 names its own"), "{error}");
}
