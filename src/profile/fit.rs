//! Fitting sums of terms to measured times: coefficients that are not negative, relative errors squared.
//!
//! Every term of a cost (a call, a byte, an operation) takes some time or none, so least squares without signs would be wrong; and
//! a kernel of 2 us counts as much as one of 2 ms, so errors are relative.

/// Coefficients, and how well they fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// Of each term, 0 or more.
    pub terms: Vec<f64>,
    /// Median of `|predicted / measured - 1|`.
    pub error: f64,
}

impl Fit {
    /// What it predicts.
    pub fn predict(&self, amounts: &[f64]) -> f64 {
        self.terms.iter().zip(amounts).map(|(c, a)| c * a).sum()
    }
}

/// Sweeps of coordinate descent; a few terms converge in far fewer.
const SWEEPS: usize = 5000;

/// Fits `time = sum of terms[i] * amounts[i]` to rows of amounts and a measured time of more than 0.
pub fn fit(rows: &[(Vec<f64>, f64)]) -> Fit {
    let terms = rows.first().map_or(0, |r| r.0.len());
    // Relative: every row is divided by its time, every column by its norm.
    let relative = |i: usize| rows.iter().map(move |(a, t)| a[i] / t);
    let norm: Vec<f64> = (0..terms).map(|i| relative(i).map(|x| x * x).sum::<f64>().sqrt()).collect();
    let column: Vec<Vec<f64>> =
        (0..terms).map(|i| relative(i).map(|x| if norm[i] > 0.0 { x / norm[i] } else { 0.0 }).collect()).collect();
    let mut c = vec![0.0_f64; terms];
    let mut rest = vec![1.0_f64; rows.len()];
    for _ in 0..SWEEPS {
        let mut moved = 0.0_f64;
        for i in (0..terms).filter(|i| norm[*i] > 0.0) {
            let along: f64 = column[i].iter().zip(&rest).map(|(x, r)| x * r).sum();
            let step = (c[i] + along).max(0.0) - c[i];
            if step != 0.0 {
                c[i] += step;
                rest.iter_mut().zip(&column[i]).for_each(|(r, x)| *r -= step * x);
                moved = moved.max(step.abs());
            }
        }
        if moved < 1e-10 {
            break;
        }
    }
    let scale = |(c, n): (&f64, &f64)| if *n > 0.0 { c / n } else { 0.0 };
    let fit = Fit { terms: c.iter().zip(&norm).map(scale).collect(), error: 0.0 };
    let mut errors: Vec<f64> = rows.iter().map(|(a, t)| (fit.predict(a) / t - 1.0).abs()).collect();
    Fit { error: quantile(&mut errors, 0.5), ..fit }
}

/// The value below which that part of the values lie; 0 of none.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * part).round() as usize;
    values.get(at).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_found_again() {
        let truth = [2e-6, 3e-10, 0.0];
        let rows: Vec<(Vec<f64>, f64)> = [(1e3, 5.0), (1e5, 1.0), (1e6, 9.0), (2e4, 3.0)]
            .iter()
            .map(|&(bytes, other)| (vec![1.0, bytes, other], truth[0] + truth[1] * bytes))
            .collect();
        let found = fit(&rows);
        for (c, t) in found.terms.iter().zip(truth) {
            assert!((c - t).abs() <= 1e-4 * t + 1e-12, "{found:?}");
        }
        assert!(found.error < 1e-4, "{found:?}");
    }

    /// Where the best line would have a negative term, that term is 0 and the others make the best of it.
    #[test]
    fn terms_are_not_negative() {
        let rows: Vec<(Vec<f64>, f64)> = [1.0, 2.0, 4.0].iter().map(|&x| (vec![1.0, x], 2.0 * x - 0.9)).collect();
        let found = fit(&rows);
        assert!(found.terms[0] == 0.0 && found.terms[1] > 1.0 && found.error > 0.01, "{found:?}");
    }

    #[test]
    fn quantiles() {
        assert_eq!(quantile(&mut [3.0, 1.0, 2.0, 5.0, 4.0], 0.25), 2.0);
        assert_eq!(quantile(&mut [], 0.5), 0.0);
    }
}
