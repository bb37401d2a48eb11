//! The page with one scatter plot per source: predicted against measured seconds, both axes logarithmic.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::Planned;
use crate::score::{Pair, bias, mape};

const SIZE: f64 = 300.0;
const MARGIN: f64 = 40.0;

/// Self-contained HTML.
pub fn page(planned: &[Planned]) -> String {
    let mut by_source: BTreeMap<&str, Vec<(&str, Pair)>> = BTreeMap::new();
    for p in planned {
        if let Some(pair) = p.time() {
            by_source.entry(&p.case.source).or_default().push((&p.case.measured.ids[0], pair));
        }
    }
    let mut out = String::from(
        "<!doctype html><meta charset=utf-8><title>Predicted and measured step times</title><style>body{font:14px system-ui;margin:24px}\
         figure{display:inline-block;margin:8px}circle{fill:#2563eb;fill-opacity:.6}line{stroke:#999}.band{stroke:#ddd}text{font-size:11px;fill:#444}</style>\
         <h1>Predicted and measured step times</h1><p>One point per configuration; the line is equality, the pale ones 15 % off. \
         Hover for the row.</p>",
    );
    for (source, points) in by_source {
        let pairs: Vec<Pair> = points.iter().map(|p| p.1).collect();
        let all = pairs.iter().flat_map(|p| [p.0, p.1]);
        let (low, high) = all.fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), x| (l.min(x), h.max(x)));
        let (low, high) = ((low * 0.8).ln(), (high * 1.25).ln());
        let x = |v: f64| MARGIN + (v.ln() - low) / (high - low) * SIZE;
        let y = |v: f64| SIZE + 10.0 - (v.ln() - low) / (high - low) * SIZE;
        let _ = write!(out, "<figure><svg width={0} height={0}>", SIZE + MARGIN + 20.0);
        for (factor, class) in [(1.0 / 1.15, "band"), (1.15, "band"), (1.0, "")] {
            let (a, b) = (low.exp(), high.exp());
            let _ = write!(
                out,
                "<line class='{class}' x1={:.1} y1={:.1} x2={:.1} y2={:.1} />",
                x(a),
                y(a * factor),
                x(b),
                y(b * factor)
            );
        }
        for tick in [0.1, 1.0, 10.0, 100.0].into_iter().filter(|t: &f64| (low..high).contains(&t.ln())) {
            let _ = write!(
                out,
                "<text x={:.1} y={:.1}>{tick} s</text><text x=4 y={:.1}>{tick} s</text>",
                x(tick),
                SIZE + 26.0,
                y(tick)
            );
        }
        for (id, (predicted, measured)) in &points {
            let _ = write!(
                out,
                "<circle cx={:.1} cy={:.1} r=4><title>{id}: predicted {predicted:.3} s, measured {measured:.3} s ({:+.1} %)</title></circle>",
                x(*measured),
                y(*predicted),
                100.0 * (predicted / measured - 1.0)
            );
        }
        let _ = write!(
            out,
            "</svg><figcaption><b>{source}</b>: {} rows, error {:.1} %, bias {:+.1} %<br>across: measured, up: predicted</figcaption></figure>",
            pairs.len(),
            100.0 * mape(&pairs),
            100.0 * bias(&pairs)
        );
    }
    out
}
