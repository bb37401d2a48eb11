//! The textual form: round trip of every operator and of tensors of every element type, and the errors of the parser.

use autoshard_ir::graph::{Graph, Init, Section, StateKind};
use autoshard_ir::op::Sample;
use autoshard_ir::tensor::{Tensor, Type};
use autoshard_ir::weights::{WeightRef, WeightStorage};
use autoshard_ir::{Builder, DType, ops, text, verify};
use proptest::prelude::*;

fn round_trip(g: &Graph) -> Result<(), TestCaseError> {
    let printed = text::print(g);
    let parsed = text::parse(&printed).map_err(|e| TestCaseError::fail(format!("{e}\n{printed}")))?;
    prop_assert_eq!(text::print(&parsed), printed);
    if let Err(violations) = verify::verify(&parsed) {
        return Err(TestCaseError::fail(verify::report(&violations)));
    }
    Ok(())
}

/// A graph with one node per sample, on inputs and states of its own.
fn graph_of(samples: &[Sample], names: &[String]) -> Graph {
    let mut b = Builder::new(names[0].clone());
    for (i, s) in samples.iter().enumerate() {
        let name = &names[i % names.len()];
        let operands: Vec<_> = s
            .inputs
            .iter()
            .enumerate()
            .map(|(j, x)| match j % 3 {
                0 => b.input(format!("{i}.{j} {name}"), x.ty.clone(), (x.ty.rank() > 0).then_some(0)),
                1 => {
                    let storage = WeightStorage::File { path: name.into(), offset: 64, length: x.ty.bytes() as u64 };
                    let region = x.ty.dims.iter().map(|&d| 0..d).collect();
                    let w = WeightRef { initializer: name.clone(), ty: x.ty.clone(), region, storage };
                    let id = b.state(format!("{i}.{j}"), StateKind::Parameter, x.ty.clone(), Init::Weight(w), None);
                    b.graph_mut().states[id.index()].trainable = i % 2 == 0;
                    b.graph().state(id).read
                }
                _ => {
                    let id = b.state(format!("{i}.{j}"), StateKind::Optimizer, x.ty.clone(), Init::Zeros, None);
                    b.graph().state(id).read
                }
            })
            .collect();
        b.name.clone_from(name);
        b.scope = if i % 2 == 0 { String::new() } else { name.clone() };
        b.enter(if s.op.name() == verify::ACCUMULATE { Section::Backward } else { Section::Forward });
        let outs = b.emit(s.op.clone(), &operands).expect("samples fit their operator");
        b.output(format!("out {i}"), outs[0], None);
    }
    b.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: proptest::test_runner::RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn graphs_of_any_operators_print_the_same_after_parsing(
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
        names in prop::collection::vec(".{0,12}", 1..4),
    ) {
        let samples: Vec<Sample> = picks
            .iter()
            .map(|i| {
                let mut all = (ops::TABLE[i.index(ops::TABLE.len())].samples)();
                let at = i.index(all.len());
                all.swap_remove(at)
            })
            .collect();
        round_trip(&graph_of(&samples, &names))?;
    }

    #[test]
    fn tensors_of_any_bits_keep_them(
        dtype in prop::sample::select(DType::ALL.to_vec()),
        dims in prop::collection::vec(0usize..5, 0..4),
        seed in prop::collection::vec(any::<u8>(), 1..16),
    ) {
        let ty = Type::new(dtype, dims);
        let mut t = Tensor::zeros(ty);
        t.bytes_mut().iter_mut().zip(seed.iter().cycle()).for_each(|(b, s)| *b = *s);
        let mut b = Builder::new("t");
        b.constant(t.clone());
        let g = b.finish();
        round_trip(&g)?;
        let parsed = text::parse(&text::print(&g)).unwrap();
        prop_assert_eq!(&**parsed.constant(autoshard_ir::ValueId(0)).unwrap(), &t);
    }

    #[test]
    fn no_text_makes_the_parser_panic(cut in 0usize..MLP.len(), insert in ".{0,3}") {
        let at = (cut..=MLP.len()).find(|&i| MLP.is_char_boundary(i)).unwrap();
        let _ = text::parse(&MLP[..at]);
        let _ = text::parse(&format!("{}{insert}{}", &MLP[..at], &MLP[at..]));
    }
}

#[test]
fn every_operator_survives_the_round_trip() {
    for def in ops::TABLE {
        let samples = (def.samples)();
        round_trip(&graph_of(&samples, &[def.name.to_string()])).unwrap();
    }
}

const MLP: &str = r#"graph "mlp" {
  inputs {
    %0 = "x" : f32[4,8] batch 0
  }
  states {
    %1 = parameter "w" : f32[8,2] = weight "wqkv" f32[8,6][0:8,2:4] file "mlp.onnx" 512 192
    %2 = frozen "b" : f32[2] = weight "b" f32[2][0:2] inline [0.5, -1.0]
    %3 = optimizer "adam.m/w" : f32[8,2] = zeros of "w" -> %3
  }
  constants {
    %4 : f32[2,12] = splat(1.0)
  }
  forward {
    %5 "hidden" = Einsum{eq="bk,kn->bn"}(%0, %1) : f32[4,2]  "/fc/MatMul" in "fc"
    %6 = Add(%5, %2) : f32[4,2]
  }
  backward {
    %7 = Neg(%6) : f32[4,2] of n1
  }
  outputs {
    "y" = %6 batch 0
  }
}
"#;

#[test]
fn what_is_printed_is_what_was_parsed() {
    assert_eq!(text::print(&text::parse(MLP).unwrap()), MLP);
}

#[test]
fn words_name_values_types_may_be_left_out_and_comments_are_skipped() {
    let g = text::parse(
        r#"graph "g" { # a sum
             inputs { %x = "x" : i64[2] }
             constants { %two : i64[2] = [1, 2] }
             forward { %sum = Add(%x, %two) # of both
                       %y = Neg(%sum) }
             outputs { "y" = %y } }"#,
    )
    .unwrap();
    insta::assert_snapshot!(text::print(&g));
}

#[test]
fn errors_say_where_and_what_was_expected() {
    let cases: Vec<(&str, &str)> = vec![
        ("graph \"mlp\"", "graf \"mlp\""),
        ("inputs {", "imputs {"),
        ("f32[4,8] batch 0", "f33[4,8]"),
        ("f32[4,8] batch 0", "f32[4 8]"),
        ("f32[4,8] batch 0", "f32[4,-8]"),
        ("f32[4,8] batch 0", "f32[99999999999,99999999999]"),
        ("[0:8,2:4]", "[0:8,2:5]"),
        ("file \"mlp.onnx\" 512", "file \"mlp.onnx"),
        ("[0.5, -1.0]", "[0.5]"),
        ("[0.5, -1.0]", "[0.5, true]"),
        ("of \"w\"", "of \"u\""),
        ("-> %3", "-> %33"),
        ("splat(1.0)", "elided \"sha256:00\""),
        ("splat(1.0)", "hex \"zz\""),
        ("Einsum{", "Einsumm{"),
        ("{eq=", "{equation="),
        ("\"bk,kn->bn\"", "bk"),
        ("(%0, %1)", "(%0, %9)"),
        ("(%0, %1)", "(%0 %1)"),
        ("(%0, %1)", "(%0, %4)"),
        ("%6 = Add(%5, %2) : f32[4,2]", "%6 = Add(%5, %2) : f32[4,3]"),
        ("%6 = Add", "%5 = Add"),
        ("%6 = Add", "%6, %8 = Add"),
        ("of n1", "of n7"),
        ("\"y\" = %6 batch 0\n  }\n}", "\"y\" = %6 batch 0\n  }\n"),
        ("\"y\" = %6", "\"y\" = ~6"),
    ];
    let mut report = String::new();
    for (from, to) in cases {
        assert!(MLP.contains(from), "{from}");
        let text = MLP.replacen(from, to, 1);
        let error = text::parse(&text).expect_err(to);
        let line = text.lines().nth(error.line - 1).unwrap_or("").trim();
        report += &format!("{line}\n  {error}\n");
    }
    insta::assert_snapshot!(report);
}
