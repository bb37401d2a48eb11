//! How far predictions are off: mean absolute percentage error, bias, rank correlation.

/// Predicted and measured, in the same unit.
pub type Pair = (f64, f64);

/// Mean of |predicted / measured - 1|.
pub fn mape(pairs: &[Pair]) -> f64 {
    pairs.iter().map(|(p, m)| (p / m - 1.0).abs()).sum::<f64>() / pairs.len() as f64
}

/// Mean of predicted / measured - 1: positive is pessimistic.
pub fn bias(pairs: &[Pair]) -> f64 {
    pairs.iter().map(|(p, m)| p / m - 1.0).sum::<f64>() / pairs.len() as f64
}

/// Kendall's tau-b of groups of pairs: concordant less discordant pairs, over those without ties, within groups only.
pub fn kendall<'a>(groups: impl Iterator<Item = &'a Vec<Pair>>) -> f64 {
    let (mut agree, mut all) = (0i64, [0i64; 2]);
    for group in groups {
        for (i, a) in group.iter().enumerate() {
            for b in &group[..i] {
                let (p, m) = (a.0.total_cmp(&b.0) as i64, a.1.total_cmp(&b.1) as i64);
                agree += p * m;
                all[0] += p.abs();
                all[1] += m.abs();
            }
        }
    }
    agree as f64 / ((all[0] as f64) * (all[1] as f64)).sqrt()
}
