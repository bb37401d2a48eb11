//! What the search proves is so, and what it may not do is refused.

use super::*;

/// `h = x w1` is read by a product, a tanh and a sum, and is an output: made once in each spec, however many need it.
fn shared(batch: usize, hidden: usize) -> Graph {
    let mut g = Builder::new("shared");
    let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
    let x = g.input("x", f32(&[batch, hidden]), Some(0));
    let w1 = g.state("w1", StateKind::Parameter, f32(&[hidden, hidden]), Init::Zeros, None);
    let w2 = g.state("w2", StateKind::Parameter, f32(&[hidden, hidden]), Init::Zeros, None);
    let (w1, w2) = (g.graph().state(w1).read, g.graph().state(w2).read);
    let h = g.einsum("bk,kn->bn", x, w1).unwrap();
    let y = g.einsum("bk,kn->bn", h, w2).unwrap();
    let t = g.tanh(h).unwrap();
    let z = g.add(h, t).unwrap();
    for (name, v) in [("h", h), ("y", y), ("z", z)] {
        g.output(name, v, Some(0));
    }
    g.finish()
}

/// `h = x w1` is gathered for two wide products, and read as it is by a tanh.
fn gathered(batch: usize, hidden: usize) -> Graph {
    let mut g = Builder::new("gathered");
    let f32 = |dims: &[usize]| Type::new(DType::F32, dims);
    let x = g.input("x", f32(&[batch, hidden]), Some(0));
    let parameter = |g: &mut Builder, name: &str, width: usize| {
        let s = g.state(name, StateKind::Parameter, f32(&[hidden, width]), Init::Zeros, None);
        g.graph().state(s).read
    };
    let [w1, w2, w3] = [("w1", 1), ("w2", 4), ("w3", 4)].map(|(name, n)| parameter(&mut g, name, n * hidden));
    let h = g.einsum("bk,kn->bn", x, w1).unwrap();
    let outs = [g.einsum("bk,kn->bn", h, w2), g.einsum("bk,kn->bn", h, w3), g.tanh(h)];
    for (name, v) in ["y", "z", "t"].into_iter().zip(outs) {
        g.output(name, v.unwrap(), Some(0));
    }
    g.finish()
}

/// The ILP's optimum is no more than the simulated time of the best assignment: what makes it a bound.
#[test]
fn the_optimum_of_the_problem_is_below_that_of_the_simulation() {
    let cluster = cluster(2);
    let sizes = [(8, 64), (512, 512), (16, 4096), (4096, 1024)];
    let graphs = sizes.into_iter().flat_map(|(b, h)| [(b, h, shared(b, h)), (b, h, gathered(b, h))]);
    for (batch, hidden, graph) in graphs {
        for axis in [AxisName::Tp, AxisName::Dp] {
            let mesh = Mesh::new([(axis, 2)]);
            let request = PlanRequest::new(Workload::infer(batch));
            let best = optimum(&exhaustive(&graph, &mesh, &cluster, &request, u64::MAX)).unwrap();
            let step = request.workload.step(&graph, &[], 1, RecomputeChoice::None).unwrap();
            let space = Space::new(&step, &mesh, &request.constraints).unwrap();
            let pace = Pace { micro_batches: 1, schedule: Schedule::OneF1B, chunks: 1 };
            let view = Step { graph: &step.graph, blocks: &step.blocks, stages: &step.stages, pace };
            let mut times = Times::new(&cluster, &mesh);
            let formulation = Formulation::new(&view, &space, &mut times, &[UNLIMITED]);
            let solution = solve(&formulation.problem, &Options::default()).unwrap();
            let bound = formulation.problem.value(solution.bound);
            assert!(bound <= best * (1.0 + 1e-6), "{axis:?} {} {batch} {hidden}: {bound} is above {best}", graph.name);
            assert!(bound >= best * 0.5, "{axis:?} {} {batch} {hidden}: {bound} says little of {best}", graph.name);
        }
    }
}

/// For least memory, what is proven is held together by every plan: activations that live for a moment are not.
#[test]
fn the_bound_on_memory_leaves_out_what_lives_for_a_moment() {
    let source = |batch: usize| {
        let mut g = Builder::new("chain");
        let mut x = g.input("x", Type::new(DType::F32, [batch, 4096]), Some(0));
        for _ in 0..40 {
            x = g.tanh(x).unwrap();
            x = g.exp(x).unwrap();
        }
        g.output("y", x, Some(0));
        Ok::<Graph, String>(g.finish())
    };
    let request = PlanRequest { objective: Objective::Memory, ..PlanRequest::new(Workload::infer(64)) };
    let found = plan(&source, &cluster(1), &request);
    // The rows of inference hold states alone.
    assert!(found.certificate.bound < found.certificate.objective / 2.0, "{:?}", found.certificate);
}

/// A model in which samples meet is not cut into micro-batches, and says so; pinned, it is refused.
#[test]
fn what_couples_samples_is_not_cut() {
    let source = |batch: usize| {
        let mut g = Builder::new("centred");
        let x = g.input("x", Type::new(DType::F32, [batch, 64]), Some(0));
        let w = g.state("w", StateKind::Parameter, Type::new(DType::F32, [64, 64]), Init::Zeros, None);
        let w = g.graph().state(w).read;
        let h = g.einsum("bk,kn->bn", x, w).unwrap();
        let mean = g.reduce_mean(h, &[0], true).unwrap();
        let y = g.sub(h, mean).unwrap();
        g.output("y", y, Some(0));
        Ok::<Graph, String>(g.finish())
    };
    let found = plan(&source, &cluster(2), &training(16));
    assert_eq!(found.best.candidate.pace.micro_batches, 1);
    assert!(found.best.notes.iter().any(|n| n.starts_with("the batch is not cut into micro-batches: ")));
    let mut request = training(16);
    request.constraints.micro_batch = Some(2);
    let e = search(&source, &cluster(2), &request, None, &|_, _, _| {}).err().expect("cannot be cut");
    assert!(e.to_string().contains("cannot be cut into micro-batches"), "{e}");
}

/// Sine and cosine of one value: the gradient of either is the other, which a copy must not take the place of.
#[test]
fn copies_beside_equal_gradients_are_planned() {
    let source = |batch: usize| {
        let mut b = Builder::new("waves");
        let mut x = b.input("x", Type::new(DType::F32, [batch, 64]), Some(0));
        for l in 0..4 {
            let w = b.state(format!("{l}.w"), StateKind::Parameter, Type::new(DType::F32, [64, 64]), Init::Zeros, None);
            let w = b.graph().state(w).read;
            let h = b.einsum("bk,kn->bn", x, w).unwrap();
            let (s, c) = (b.sin(h).unwrap(), b.cos(h).unwrap());
            let p = b.mul(s, c).unwrap();
            x = b.add(x, p).unwrap();
        }
        b.output("y", x, Some(0));
        Ok::<Graph, String>(b.finish())
    };
    for way in [RecomputeChoice::Selective, RecomputeChoice::Full] {
        let mut request = training(64);
        request.constraints.recompute = Some(way);
        assert_eq!(plan(&source, &cluster(2), &request).best.candidate.recompute, way);
    }
}

/// Files that contradict themselves are refused before anything is made of their numbers.
#[test]
fn plans_that_contradict_themselves_are_refused() {
    let graph = mlp(8, 64, 4, 64);
    let source = |batch: usize| Ok::<Graph, String>(mlp(batch, 64, 4, 64));
    let mut request = training(8);
    request.constraints = Constraints { pp: Some(2), dp: Some(1), micro_batch: Some(8), ..Constraints::default() };
    let found = plan(&source, &cluster(2), &request);
    let model = crate::plan::ModelEntry { path: String::new(), sha256: String::new(), parameters: 0 };
    let good = crate::plan::Plan::new(&found, &request, &cluster(2), model, None, Vec::new());
    good.resolve_graph(&graph).unwrap();
    let refused = |change: &dyn Fn(&mut crate::plan::Plan)| {
        let mut p = good.clone();
        change(&mut p);
        p.resolve_graph(&graph).expect_err("contradicts itself").to_string()
    };
    let texts = [
        refused(&|p| p.pipeline.cuts[1] = usize::MAX),
        refused(&|p| p.pipeline.micro_batches = 3),
        refused(&|p| p.workload.global_batch = 9),
        refused(&|p| p.mesh.axes[1].name = "pp".into()),
        refused(&|p| p.mesh.axes[0].size = usize::MAX),
        refused(&|p| drop(p.operators[0].strategy.insert("tp".into(), "split b".into()))),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}
