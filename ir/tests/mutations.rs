//! Damaged model files give errors, never panics, and take bounded time.

mod recorded;

use std::ops::Range;
use std::time::{Duration, Instant};

use autoshard_ir::onnx::proto::onnx::{ModelProto, TensorProto};
use autoshard_ir::onnx::{Bindings, Model};
use autoshard_ir::verify::verify;
use bytes::Bytes;
use protobuf::Message;
use recorded::{bindings, files, models, npz};

/// A small generator, so that the same mutations are made everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 16
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// The parts of a file that are no weights. Small tensors count as structure: sizes and axes are among them.
fn structure(model: &Model, bytes: &Bytes) -> Vec<Range<usize>> {
    let raw = model.proto().graph.initializer.iter().filter_map(|t| t.raw_data.as_ref()).filter(|r| r.len() > 64);
    let start = |r: &Bytes| r.as_ptr() as usize - bytes.as_ptr() as usize;
    let mut raw: Vec<Range<usize>> = raw.map(|r| start(r)..start(r) + r.len()).collect();
    raw.sort_by_key(|r| r.start);
    let starts = std::iter::once(0).chain(raw.iter().map(|r| r.end));
    let ends = raw.iter().map(|r| r.start).chain([bytes.len()]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|r| !r.is_empty()).collect()
}

fn mutate(bytes: &[u8], places: &[Range<usize>], random: &mut Random) -> Vec<u8> {
    let mut out = bytes.to_vec();
    // Mostly where the structure is, small parts as often as large ones: weights have no wrong bytes.
    let place = |random: &mut Random| {
        if random.below(8) == 0 {
            return random.below(bytes.len());
        }
        let r = &places[random.below(places.len())];
        r.start + random.below(r.len())
    };
    match random.below(10) {
        0 => out.truncate(random.below(bytes.len())),
        1 => {
            let at = place(random);
            let len = (1 + random.below(64)).min(bytes.len() - at);
            out[at..at + len].iter_mut().for_each(|b| *b = random.next() as u8);
        }
        2 => {
            let at = place(random);
            let len = (1 + random.below(64)).min(bytes.len() - at);
            out.drain(at..at + len);
        }
        3 => {
            // The largest number that the format can say, as a length or a size.
            let at = place(random);
            let huge: [u8; 9] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
            let n = 1 + random.below(9);
            for (b, &x) in out[at..].iter_mut().zip(&huge[9 - n..]) {
                *b = x;
            }
        }
        _ => {
            for _ in 0..1 + random.below(4) {
                let at = place(random);
                out[at] ^= 1 << random.below(8);
            }
        }
    }
    out
}

/// Numbers that break careless arithmetic.
const HARD: [i64; 14] = [0, 1, -1, 2, -2, 3, 7, 64, 1 << 20, i32::MAX as i64, 1 << 33, 1 << 50, i64::MAX, i64::MIN];

fn some<'a, T>(random: &mut Random, xs: &'a mut [T]) -> Option<&'a mut T> {
    let at = random.below(xs.len());
    xs.get_mut(at)
}

/// Changes what a well-formed file says.
fn change(model: &mut ModelProto, random: &mut Random) {
    let graph = model.graph.mut_or_insert_default();
    let names: Vec<String> = graph.node.iter().flat_map(|n| n.output.iter().chain(&n.input).cloned()).collect();
    let name = names[random.below(names.len())].clone();
    let hard = HARD[random.below(HARD.len())];
    let nodes = graph.node.len();
    let at = random.below(nodes);
    match random.below(14) {
        0 => {
            graph.node.remove(at);
        }
        1 => {
            let copy = graph.node[at].clone();
            graph.node.push(copy);
        }
        2 | 3 => {
            if let Some(input) = some(random, &mut graph.node[at].input) {
                *input = name;
            }
        }
        4 => {
            let other = graph.node[random.below(nodes)].op_type.clone();
            graph.node[at].op_type = other;
        }
        5 => {
            graph.node[at].input.pop();
        }
        6 => graph.node[at].input.push(name),
        7 => {
            if let Some(output) = some(random, &mut graph.node[at].output) {
                *output = name;
            }
        }
        8 => {
            let attrs = &mut graph.node[at].attribute;
            let n = attrs.len();
            if n > 0 {
                attrs.remove(random.below(n));
            }
        }
        9 => {
            if let Some(a) = some(random, &mut graph.node[at].attribute) {
                a.i = a.i.map(|_| hard);
                if let Some(x) = some(random, &mut a.ints) {
                    *x = hard;
                }
            }
        }
        10 => {
            if let Some(t) = some(random, &mut graph.initializer)
                && let Some(d) = some(random, &mut t.dims)
            {
                *d = hard;
            }
        }
        11 => {
            let small = |t: &&mut TensorProto| t.data_type() == 7 && t.raw_data.as_ref().is_some_and(|r| !r.is_empty());
            let constants = graph.node.iter_mut().flat_map(|n| &mut n.attribute).filter_map(|a| a.t.as_mut());
            let mut all: Vec<&mut TensorProto> = graph.initializer.iter_mut().chain(constants).filter(small).collect();
            if let Some(t) = some(random, &mut all) {
                let mut raw = t.raw_data().to_vec();
                let at = random.below(raw.len() / 8) * 8;
                raw[at..at + 8].copy_from_slice(&hard.to_le_bytes());
                t.set_raw_data(raw.into());
            }
        }
        12 => {
            if let Some(t) = some(random, &mut graph.initializer) {
                t.set_data_type(random.below(18) as i32);
            }
        }
        _ => {
            if let Some(o) = some(random, &mut model.opset_import) {
                o.set_version([1, 5, 7, 9, 11, 13, 17, 18, 22, 24, hard][random.below(11)]);
            }
        }
    }
}

fn try_import(bytes: Vec<u8>, sizes: &Bindings) -> bool {
    let Ok(model) = Model::from_bytes("mutated.onnx", bytes) else { return false };
    let mut bound = Bindings::default();
    for symbol in model.symbols() {
        let size = sizes.0.get(&symbol.name).copied().unwrap_or(3);
        bound.0.insert(symbol.name, size);
    }
    match model.instantiate(&bound) {
        Ok(graph) => {
            verify(&graph).unwrap_or_else(|v| panic!("an invariant is broken: {v:?}"));
            true
        }
        Err(e) => {
            assert!(!e.to_string().is_empty());
            false
        }
    }
}

#[test]
fn mutated_models_give_errors_and_no_panics() {
    let count: usize = std::env::var("MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    let paths = files(&models(), ".onnx");
    let (mut good, mut slowest, mut failed) = (0, Duration::ZERO, Vec::new());
    let start = Instant::now();
    for (i, path) in paths.iter().enumerate() {
        let bytes = Bytes::from(std::fs::read(path).expect("the model"));
        let whole = Model::from_bytes(path, bytes.clone()).expect("an undamaged model");
        let sizes = bindings(&whole, &npz(&path.with_extension("npz")), "in0");
        let places = structure(&whole, &bytes);
        let mut random = Random(i as u64 + 1);
        for n in 0..count / paths.len() {
            let mutated = if n % 2 == 0 {
                mutate(&bytes, &places, &mut random)
            } else {
                let mut model = whole.proto().clone();
                (0..1 + random.below(3)).for_each(|_| change(&mut model, &mut random));
                model.write_to_bytes().expect("a message")
            };
            let one = Instant::now();
            let caught = std::panic::catch_unwind(|| try_import(mutated.clone(), &sizes));
            let took = one.elapsed();
            slowest = slowest.max(took);
            if caught.is_err() || took > Duration::from_secs(10) {
                let kept = std::env::temp_dir().join(format!("autoshard-mutation-{}.onnx", failed.len()));
                std::fs::write(&kept, &mutated).expect("a file to keep it in");
                let what = if caught.is_err() { "panics".to_string() } else { format!("takes {took:?}") };
                failed.push(format!("mutation {n} of {} {what}; it is kept as {}", path.display(), kept.display()));
                assert!(failed.len() < 20, "{failed:#?}");
            }
            good += usize::from(caught.is_ok_and(|ok| ok));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    println!("{good} of {count} still import; slowest {slowest:?}; all {:?}", start.elapsed());
}
