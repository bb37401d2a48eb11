//! Inputs drawn at random, valid for the model: indices stay inside the tables they look up, masks are ones.

use std::collections::BTreeMap;

use autoshard_ir::graph::{Graph, ValueId};
use autoshard_ir::{Tensor, convert};
use autoshard_runtime::random::Stream;

/// Per integer input, the number of valid indices; `None` where it looks up nothing.
fn table_sizes(graph: &Graph) -> Vec<Option<usize>> {
    let uses = graph.uses();
    graph
        .inputs
        .iter()
        .map(|input| {
            let mut least: Option<usize> = None;
            let mut stack = vec![input.value];
            let mut seen = std::collections::BTreeSet::new();
            while let Some(v) = stack.pop() {
                if !seen.insert(v) {
                    continue;
                }
                for &n in &uses[v.index()] {
                    let node = graph.node(n);
                    let is = |i: usize| node.inputs.get(i) == Some(&v);
                    let size = |of: ValueId, axis: usize| graph.ty(of).dims.get(axis).copied();
                    let found = match node.op.name() {
                        "Gather" | "GatherElements" if is(1) => size(node.inputs[0], node.op.get_int("axis") as usize),
                        "CrossEntropyParts" if is(1) => graph.ty(node.inputs[0]).dims.last().copied(),
                        "Reshape" | "Slice" | "Pad" | "Expand" | "Concat" | "Transpose" | "Cast" | "Where" => {
                            stack.extend(node.outputs.iter().filter(|o| !graph.ty(**o).dtype.is_float()));
                            None
                        }
                        _ => None,
                    };
                    least = least.into_iter().chain(found).min();
                }
            }
            least
        })
        .collect()
}

/// One tensor per input of a graph: floats in [-1, 1), indices in range, other integers 1.
pub fn inputs(graph: &Graph, seed: u64) -> BTreeMap<String, Tensor> {
    let sizes = table_sizes(graph);
    let mut drawn = BTreeMap::new();
    for (i, (input, size)) in graph.inputs.iter().zip(sizes).enumerate() {
        let ty = graph.ty(input.value).clone();
        let mut draw = Stream(seed ^ (i as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03));
        let mut t = Tensor::zeros(ty.clone());
        let float = ty.dtype.is_float();
        let elements = (0..ty.numel()).map(|_| match size {
            _ if float => draw.uniform() * 2.0 - 1.0,
            Some(n) => (draw.uniform() * n as f64).floor(),
            None => 1.0,
        });
        convert::from_f64(ty.dtype, elements, t.bytes_mut());
        drawn.insert(input.name.clone(), t);
    }
    drawn
}
