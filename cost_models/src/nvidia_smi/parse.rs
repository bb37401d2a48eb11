//! From text to the matrix: links of GPUs, names of GPUs.

use crate::error::ClusterError;

/// How two GPUs are joined, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Link {
    /// By so many NVLinks.
    NvLink(u32),
    /// By one PCIe switch.
    Pix,
    /// By several PCIe switches.
    Pxb,
    /// By a PCIe host bridge.
    Phb,
    /// By the bridges inside a NUMA node.
    Node,
    /// By the links between NUMA nodes.
    Sys,
}

impl Link {
    fn parse(cell: &str) -> Option<Link> {
        Some(match cell {
            "PIX" => Link::Pix,
            "PXB" => Link::Pxb,
            "PHB" => Link::Phb,
            "NODE" => Link::Node,
            // SOC: as drivers of 2016 said.
            "SYS" | "SOC" => Link::Sys,
            _ => {
                let n: u32 = cell.strip_prefix("NV")?.parse().ok()?;
                return (n > 0).then_some(Link::NvLink(n));
            }
        })
    }
}

/// What the text says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// By pair of GPUs; none on the diagonal.
    pub links: Vec<Vec<Option<Link>>>,
    /// Names of GPUs, as `nvidia-smi -L` gives them; empty where the text has none.
    pub names: Vec<String>,
    /// MiB of each GPU's memory, where the text says so.
    pub memory_mib: Vec<u64>,
    /// Network cards in the matrix.
    pub cards: usize,
}

impl Topology {
    /// The number of GPUs.
    pub fn gpus(&self) -> usize {
        self.links.len()
    }
}

/// A word and where it begins, counted from 1.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    column: usize,
}

/// The text without the escapes that terminals are told colours by.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\u{1b}' {
            out.push(c);
            continue;
        }
        // ESC [ parameters, up to a letter.
        if rest.next() == Some('[') {
            for c in rest.by_ref() {
                if c.is_ascii_alphabetic() {
                    break;
                }
            }
        }
    }
    out
}

fn words(line: &str) -> Vec<Word<'_>> {
    let mut all = Vec::new();
    let mut at = 0;
    for text in line.split_whitespace() {
        let start = at + line[at..].find(text).unwrap_or(0);
        all.push(Word { text, column: line[..start].chars().count() + 1 });
        at = start + text.len();
    }
    all
}

/// The number of `GPU3`.
fn gpu(word: &str) -> Option<usize> {
    word.strip_prefix("GPU").filter(|d| !d.is_empty() && d.chars().all(|c| c.is_ascii_digit()))?.parse().ok()
}

/// A network card: `NIC0`, `mlx5_0`.
fn is_card(word: &str) -> bool {
    word.starts_with("NIC") || word.starts_with("mlx") || word.starts_with("bnxt") || word.starts_with("irdma")
}

/// The header of a matrix: it begins with GPU0 (tabs before it aside), and the line after it begins with a row's name.
fn is_header(line: &str) -> bool {
    let w = words(line);
    w.first().is_some_and(|w| w.text == "GPU0")
        && w.get(1).is_none_or(|w| Link::parse(w.text).is_none() && w.text != "X")
}

/// Whether a text holds such a matrix.
pub fn is_topology(text: &str) -> bool {
    plain(text).lines().any(is_header)
}

/// Reads the matrix and the names; `origin` names the text in errors.
pub fn topology(text: &str, origin: &str) -> Result<Topology, ClusterError> {
    let text = plain(text);
    let lines: Vec<&str> = text.lines().collect();
    let error = |line: usize, column: usize, what: String| ClusterError::Topology {
        origin: origin.into(),
        reason: format!("line {}, column {column}: {what}", line + 1),
    };
    let Some(top) = lines.iter().position(|l| is_header(l)) else {
        return Err(ClusterError::Topology {
            origin: origin.into(),
            reason: "there is no matrix of `nvidia-smi topo -m`: no line begins with GPU0, GPU1, ...".into(),
        });
    };
    let header = words(lines[top]);
    let count = header.iter().take_while(|w| gpu(w.text).is_some()).count();
    for (i, w) in header[..count].iter().enumerate() {
        if gpu(w.text) != Some(i) {
            return Err(error(top, w.column, format!("column {} is {}, but GPU{i} was expected", i + 1, w.text)));
        }
    }
    let cards = header[count..].iter().take_while(|w| is_card(w.text)).count();
    let mut links: Vec<Vec<Option<Link>>> = Vec::with_capacity(count);
    for (at, line) in lines.iter().enumerate().skip(top + 1) {
        let row = words(line);
        if links.len() == count {
            break;
        }
        let Some(first) = row.first() else { continue };
        let i = links.len();
        if gpu(first.text) != Some(i) {
            return Err(error(
                at,
                first.column,
                format!("the row of GPU{i} was expected, but this begins with `{}`", first.text),
            ));
        }
        if row.len() <= count {
            let end = line.chars().count() + 1;
            return Err(error(at, end, format!("the row of GPU{i} has {} cells of {count}", row.len() - 1)));
        }
        let mut cells = Vec::with_capacity(count);
        for (j, w) in row[1..=count].iter().enumerate() {
            cells.push(match (w.text, i == j) {
                ("X", true) => None,
                (text, false) if Link::parse(text).is_some() => Link::parse(text),
                (text, _) => {
                    let want = if i == j { "X" } else { "NV# (1 or more links), PIX, PXB, PHB, NODE or SYS" };
                    return Err(error(at, w.column, format!("GPU{i} to GPU{j} is `{text}`, but {want} was expected")));
                }
            });
        }
        for (j, cell) in cells[..i].iter().enumerate() {
            if links[j][i] != *cell {
                let column = row[1 + j].column;
                return Err(error(
                    at,
                    column,
                    format!(
                        "GPU{i} to GPU{j} is {}, but GPU{j} to GPU{i} is otherwise: the matrix must be symmetric",
                        row[1 + j].text
                    ),
                ));
            }
        }
        links.push(cells);
    }
    if links.len() < count {
        return Err(error(
            lines.len().saturating_sub(1),
            1,
            format!("the matrix ends after {} of {count} rows", links.len()),
        ));
    }
    let (names, memory_mib) = names(&lines);
    if !names.is_empty() && names.len() != count {
        return Err(ClusterError::Topology {
            origin: origin.into(),
            reason: format!("the matrix has {count} GPUs, but the file names {} of them", names.len()),
        });
    }
    Ok(Topology { links, names, memory_mib, cards })
}

/// Names, and memory where it is told: lines of `nvidia-smi -L`, else the table of `--query-gpu=name,memory.total --format=csv`.
fn names(lines: &[&str]) -> (Vec<String>, Vec<u64>) {
    // GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-...)
    let listed = |line: &&str| -> Option<String> {
        let (number, name) = line.trim().strip_prefix("GPU ")?.split_once(": ")?;
        number.parse::<usize>().ok()?;
        Some(name.split(" (UUID").next()?.trim().to_string())
    };
    let found: Vec<String> = lines.iter().filter_map(listed).collect();
    if !found.is_empty() {
        return (found, Vec::new());
    }
    // A header that names its columns, then a row per GPU.
    let cells = |line: &str| -> Vec<String> { line.split(',').map(|c| c.trim().to_string()).collect() };
    let Some(top) = lines.iter().position(|l| cells(l).iter().any(|c| c == "name")) else {
        return Default::default();
    };
    let header = cells(lines[top]);
    let name = header.iter().position(|c| c == "name").unwrap_or(0);
    let memory = header.iter().position(|c| c.starts_with("memory.total"));
    let mut found = (Vec::new(), Vec::new());
    for line in lines[top + 1..].iter().take_while(|l| !l.trim().is_empty()) {
        let row = cells(line);
        if row.len() != header.len() {
            break;
        }
        found.0.push(row[name].clone());
        let mib: Option<u64> = memory.and_then(|m| row[m].split_whitespace().next()?.parse().ok());
        found.1.extend(mib);
    }
    found
}
