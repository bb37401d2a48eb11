//! Times of operators: against hand computation, and what must hold whatever the coefficients.

use autoshard_cost_models::compute::{Coefficients, Kernel, OperatorCost};
use autoshard_cost_models::{Cluster, Seconds};
use autoshard_ir::DType;
use autoshard_ir::op::{Family, Work};
use proptest::prelude::*;

fn cluster(name: &str) -> Cluster {
    Cluster::load(name).unwrap_or_else(|e| panic!("{e}"))
}

/// A matrix product in elements of `size` bytes.
fn matmul(batch: usize, m: usize, n: usize, k: usize, size: usize) -> Work {
    let flops = 2.0 * batch as f64 * m as f64 * n as f64 * k as f64;
    let bytes = (batch * (m * k + k * n + m * n) * size) as f64;
    Work { family: Family::MatMul, flops, bytes, gemm: Some([batch, m, n, k]), ..Work::FREE }
}

/// What fraction of the dense peak a product reaches.
fn efficiency(c: &Cluster, w: &Work, dtype: DType) -> f64 {
    w.flops / c.op_time(w, dtype).0 / c.device.peak_for(dtype).0
}

#[test]
fn large_products_reach_the_measured_maximum() {
    // Published maximum achievable rates of isolated products, as fractions of the peak; a well-shaped product is close, and
    // never above. In steps it is slower.
    for (name, most) in [("dgx-a100", 0.869), ("dgx-h100", 0.803), ("dgx-b200", 0.776)] {
        let mut c = cluster(name);
        let in_steps = efficiency(&c, &matmul(1, 16384, 16384, 8192, 2), DType::Bf16);
        c.device.compute = Some(Coefficients { sustained: 1.0, ..c.device.coefficients().clone() });
        let e = efficiency(&c, &matmul(1, 16384, 16384, 8192, 2), DType::Bf16);
        assert!(e <= most && e > 0.9 * most, "{name}: {e}");
        assert!(in_steps <= e && in_steps > 0.7 * e, "{name}: {in_steps} of {e}");
    }
}

#[test]
fn a_wave_more_costs_a_wave() {
    // 108 processors, tiles of 256 x 128: 12 x 9 tiles fill one wave; a further row of tiles needs a second one.
    let c = cluster("dgx-a100");
    let full = efficiency(&c, &matmul(1, 12 * 256, 9 * 128, 16384, 2), DType::Bf16);
    let spill = efficiency(&c, &matmul(1, 12 * 256 + 1, 9 * 128, 16384, 2), DType::Bf16);
    assert!(spill < 0.9 * full, "{spill} against {full}");
}

#[test]
fn narrow_products_are_bound_by_memory() {
    // One token through a 8192 x 8192 weight: the weight's bytes at the streaming rate of 0.897 of 3.35 TB/s.
    let c = cluster("dgx-h100");
    let time = c.op_time(&matmul(1, 1, 8192, 8192, 2), DType::Bf16).0;
    let by_hand = (8192.0 * 8192.0 + 2.0 * 8192.0) * 2.0 / (3.35e12 * 0.897);
    assert!((time / by_hand - 1.0).abs() < 0.01, "{time} s, by hand {by_hand} s");
}

/// What was measured of an operator holds for it, of a variant before the plain one, and for no other operator.
#[test]
fn measured_operators_are_sums_of_their_terms() {
    let mut c = cluster("cpu");
    let plain = OperatorCost { call_us: 2.0, gb_s: Some(4.0), gflops: Some(8.0), scores_g_s: Some(0.5) };
    let tanh = OperatorCost { call_us: 1.0, ..OperatorCost::default() };
    let operators = [("Attention", &plain), ("Gelu", &plain), ("Gelu tanh", &tanh), ("Einsum", &tanh)];
    let operators = operators.map(|(n, cost)| (n.to_string(), cost.clone())).into();
    let coefficients = c.device.coefficients().clone();
    c.device.compute = Some(Coefficients { operators, half_gb_s: Some(1.0), ..coefficients });
    let work = |variant| Work { family: Family::Memory, bytes: 4e6, flops: 8e6, scores: 1e6, variant, ..Work::FREE };
    let time = |name, variant, dtype| c.kernel_time(&work(variant), dtype, Kernel::of(name)).as_micros();
    assert_eq!(time("Attention", "causal", DType::F32).round(), 2.0 + 1000.0 + 1000.0 + 2000.0);
    assert_eq!(time("Gelu", "", DType::F32), time("Attention", "", DType::F32));
    assert_eq!(time("Gelu", "tanh", DType::F32).round(), 1.0);
    // 16-bit floats are converted.
    assert_eq!(time("Gelu", "tanh", DType::Bf16).round(), 4001.0);
    assert_eq!(time("Tanh", "", DType::F32), c.op_time(&work(""), DType::F32).as_micros());
    // Products have their tiles besides: 2 x 1 of 8 x 32, at 0.6 of 50 GFLOP/s.
    let product = c.kernel_time(&matmul(1, 16, 32, 1000, 4), DType::F32, Kernel::of("Einsum")).as_micros();
    assert!((product - 1.0 - 2.0 * 16.0 * 32.0 * 1000.0 / 30e3).abs() < 1e-6, "{product}");
}

#[test]
fn memory_bound_families() {
    let c = cluster("dgx-a100");
    let stream = |bytes| Work { family: Family::Memory, bytes, ..Work::FREE };
    let large = c.op_time(&stream(1e9), DType::Bf16).0;
    assert!((large / (1e9 / (2.039e12 * 0.394)) - 1.0).abs() < 1e-6);
    // Nothing is faster than a kernel launch, and aliases are free.
    assert_eq!(c.op_time(&stream(64.0), DType::Bf16), Seconds::micros(2.0));
    assert_eq!(c.op_time(&Work::FREE, DType::Bf16), Seconds::ZERO);
    let gather = c.op_time(&Work { family: Family::Gather, ..stream(1e9) }, DType::Bf16).0;
    assert!(gather > large);
}

#[test]
fn bf16_without_units_for_it_runs_at_the_rate_of_f32() {
    let volta = cluster("dgx1-v100-32gb");
    assert_eq!(volta.device.peak_for(DType::Bf16), volta.device.peak_for(DType::F32));
    assert!(volta.device.peak_for(DType::F16).0 > 7.0 * volta.device.peak_for(DType::F32).0);
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: proptest::test_runner::RngSeed::Fixed(5), cases: 400, failure_persistence: None, ..Default::default() })]

    /// On every cluster, a product takes at least its roofline, and splitting k or a batch never gains more than what is split.
    #[test]
    fn products_respect_the_roofline(name in prop::sample::select(autoshard_cost_models::library::names().collect::<Vec<_>>()), m in 1usize..5000, n in 1usize..5000, k in 1usize..5000, batch in 1usize..4) {
        let c = cluster(name);
        let w = matmul(batch, m, n, k, 2);
        let time = c.op_time(&w, DType::F16).0;
        prop_assert!(time.is_finite() && time > 0.0);
        prop_assert!(time >= w.flops / c.device.peak_for(DType::F16).0);
        prop_assert!(time >= w.bytes / c.device.bandwidth().0);
    }

    #[test]
    fn time_grows_with_size(name in prop::sample::select(autoshard_cost_models::library::names().collect::<Vec<_>>()), m in 1usize..3000, n in 1usize..3000, k in 1usize..3000, more in 1usize..500) {
        let c = cluster(name);
        let time = |m, n| c.op_time(&matmul(1, m, n, k, 2), DType::F16);
        prop_assert!(time(m + more, n) >= time(m, n));
        prop_assert!(time(m, n + more) >= time(m, n));
    }
}
