//! Figures for people.

use std::collections::BTreeMap;

/// `12.4 ms`
pub fn seconds(s: f64) -> String {
    match s {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// `3.1 GiB`
pub fn bytes(n: u64) -> String {
    autoshard_cost_models::Bytes(n).to_string()
}

/// `174.6 B`, `124 k`
pub fn count(n: f64) -> String {
    for (size, unit) in [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")] {
        if n >= size {
            return if n >= 100.0 * size { format!("{:.0}{unit}", n / size) } else { format!("{:.1}{unit}", n / size) };
        }
    }
    format!("{n:.0}")
}

/// `1.2 %`
pub fn percent(x: f64) -> String {
    if x < 0.1 { format!("{:.2} %", x * 100.0) } else { format!("{:.1} %", x * 100.0) }
}

/// How an operator is split, by axis: `dp: split b, tp: split k`.
pub fn strategy(by_axis: &BTreeMap<String, String>) -> String {
    let words: Vec<String> = by_axis.iter().map(|(axis, what)| format!("{axis}: {what}")).collect();
    if words.is_empty() { "replicated".into() } else { words.join(", ") }
}

/// What another choice costs more per step: `+1.2 ms (3.4 %)`, `as good`.
pub fn extra(extra_s: f64, step_s: f64) -> String {
    if extra_s <= 1e-6 * step_s {
        "as good".into()
    } else {
        format!("+{} ({})", seconds(extra_s), percent(extra_s / step_s))
    }
}

/// Text in columns: every column as wide as its widest cell. Columns of numbers (all cells but the first row's start with a
/// digit) are set to the right.
pub fn columns(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        for (i, cell) in row.iter().enumerate() {
            if widths.len() <= i {
                widths.push(0);
            }
            widths[i] = widths[i].max(cell.chars().count());
        }
    }
    let number = |c: &String| c.starts_with(|x: char| x.is_ascii_digit()) && c.chars().count() < 12;
    let right: Vec<bool> = (0..widths.len())
        .map(|i| i > 0 && rows.len() > 1 && rows[1..].iter().all(|r| r.get(i).is_none_or(number)))
        .collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(i, c)| {
                let pad = " ".repeat(widths[i] - c.chars().count());
                if right[i] { pad + c } else { c.clone() + &pad }
            })
            .collect();
        cells.join("  ").trim_end().to_string()
    };
    rows.iter().map(|r| line(r) + "\n").collect()
}
