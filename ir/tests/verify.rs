//! The verifier finds every violation of a graph's invariants, and none in sound graphs.

use autoshard_ir::graph::{Def, Graph, NodeId, Section, StateId, ValueId};
use autoshard_ir::tensor::Type;
use autoshard_ir::{DType, text, verify};

const STEP: &str = r#"graph "step" {
  inputs {
    %0 = "x" : f32[4,8] batch 0
  }
  states {
    %1 = parameter "w" : f32[4,8] = zeros -> %8
    %2 = optimizer "adam.m/w" : f32[4,8] = zeros of "w" -> %7
  }
  forward {
    %3 = Mul(%0, %1) : f32[4,8] "product"
    %4 = Tanh(%3) : f32[4,8] "act"
  }
  backward {
    %5 = Mul(%4, %0) : f32[4,8] of n1
    %6 = Accumulate(%5) : f32[4,8] of n0 "sum"
  }
  update {
    %7 = Add(%2, %6) : f32[4,8]
    %8 = Sub(%1, %7) : f32[4,8] "new"
  }
  outputs {
    "y" = %4 batch 0
  }
}
"#;

/// A name, and what spoils the graph.
type Spoiler = (&'static str, fn(&mut Graph));

const SPOILERS: &[Spoiler] = &[
    ("used before it is defined", |g| g.nodes[0].inputs[0] = ValueId(4)),
    ("used by the node that defines it", |g| g.nodes[1].inputs[0] = ValueId(4)),
    ("operand out of range", |g| g.nodes[1].inputs[0] = ValueId(99)),
    ("result out of range", |g| g.nodes[1].outputs[0] = ValueId(99)),
    ("defined twice", |g| g.nodes[2].outputs[0] = ValueId(4)),
    ("wrong type", |g| g.values[4].ty = Type::new(DType::F32, [8, 4])),
    ("one operand too few", |g| g.nodes[0].inputs.truncate(1)),
    ("forward uses backward", |g| {
        g.nodes[1].section = Section::Backward;
        g.nodes[2].section = Section::Forward;
        g.nodes[1].of = None;
        g.nodes[2].of = None;
    }),
    ("update without accumulate", |g| g.nodes[4].inputs[1] = ValueId(5)),
    ("update reads an input of the micro-batch", |g| g.nodes[4].inputs[1] = ValueId(0)),
    ("backward reads a sum over micro-batches", |g| {
        g.nodes.swap(2, 3);
        g.nodes[2].inputs[0] = ValueId(4);
        g.nodes[3].inputs[0] = ValueId(6);
        g.values[6].def = Def::Node(NodeId(2), 0);
        g.values[5].def = Def::Node(NodeId(3), 0);
    }),
    ("accumulate in update", |g| {
        g.nodes[3].section = Section::Update;
        g.nodes[3].of = None;
    }),
    ("serves a node of its own section", |g| g.nodes[3].of = Some(NodeId(2))),
    ("a forward node serves", |g| g.nodes[1].of = Some(NodeId(0))),
    ("state of the same name", |g| g.states[1].name = "w".into()),
    ("state written with another type", |g| {
        g.values[8].ty = Type::new(DType::F32, [8, 4]);
    }),
    ("state written from forward", |g| g.states[0].write = Some(ValueId(4))),
    ("state written from nowhere", |g| g.states[0].write = Some(ValueId(99))),
    ("state reads another value", |g| g.states[0].read = ValueId(2)),
    ("parameter that belongs to a state", |g| g.states[0].of = Some(StateId(1))),
    ("optimizer state of an optimizer state", |g| g.states[1].of = Some(StateId(1))),
    ("input without value", |g| g.inputs[0].value = ValueId(3)),
    ("input cut along a dim it lacks", |g| g.inputs[0].batch_dim = Some(2)),
    ("output that does not exist", |g| g.outputs[0].value = ValueId(99)),
    ("output joined along a dim it lacks", |g| g.outputs[0].batch_dim = Some(2)),
    ("output of update with a batch dim", |g| g.outputs[0].value = ValueId(8)),
    ("outputs of one name", |g| {
        let again = g.outputs[0].clone();
        g.outputs.push(again);
    }),
];

#[test]
fn a_sound_step_has_no_violation() {
    let g = text::parse(STEP).unwrap();
    assert_eq!(verify::verify(&g), Ok(()));
}

#[test]
fn every_violation_is_found_with_its_place() {
    let mut report = String::new();
    for (name, spoil) in SPOILERS {
        let mut g = text::parse(STEP).unwrap();
        spoil(&mut g);
        let violations = verify::verify(&g).expect_err(name);
        report += &format!("## {name}\n{}\n", verify::report(&violations));
    }
    insta::assert_snapshot!(report);
}

#[test]
fn several_violations_are_reported_at_once() {
    let mut g = text::parse(STEP).unwrap();
    g.nodes[0].inputs[0] = ValueId(99);
    g.values[4].ty = Type::new(DType::F64, [4, 8]);
    g.outputs[0].value = ValueId(77);
    assert_eq!(verify::verify(&g).unwrap_err().iter().filter(|v| v.reason.contains("exist")).count(), 2);
}
