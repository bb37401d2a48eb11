//! Quantities with their unit: bytes, seconds, floating-point operations, and rates of them.
//!
//! Only arithmetic that makes sense exists: `Bytes / BytesPerSecond = Seconds`, `Flops / FlopsPerSecond = Seconds`,
//! sums of like quantities, and scaling by a number. Display is for people: `3.1 GiB`, `12.4 ms`, `989 TFLOP/s`.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An amount of memory or of data. Sums and differences saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A duration.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Seconds(pub f64);

/// Floating-point operations, a multiply-add counting 2.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Flops(pub f64);

/// A rate of data.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct BytesPerSecond(pub f64);

/// A rate of arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct FlopsPerSecond(pub f64);

impl Bytes {
    /// None.
    pub const ZERO: Bytes = Bytes(0);
    /// That many GiB.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }
    /// That many MiB.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }
    /// As a number, for arithmetic on rates.
    pub const fn as_f64(self) -> f64 {
        self.0 as f64
    }
    /// The larger.
    pub fn max(self, other: Bytes) -> Bytes {
        Ord::max(self, other)
    }
}

impl Seconds {
    /// None.
    pub const ZERO: Seconds = Seconds(0.0);
    /// That many microseconds.
    pub const fn micros(us: f64) -> Seconds {
        Seconds(us * 1e-6)
    }
    /// In microseconds.
    pub const fn as_micros(self) -> f64 {
        self.0 * 1e6
    }
    /// The larger.
    pub fn max(self, other: Seconds) -> Seconds {
        Seconds(self.0.max(other.0))
    }
    /// The smaller.
    pub fn min(self, other: Seconds) -> Seconds {
        Seconds(self.0.min(other.0))
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}
impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }
}
impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}
impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, n: u64) -> Bytes {
        Bytes(self.0.saturating_mul(n))
    }
}
impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.as_f64() / rate.0)
    }
}
impl Div<FlopsPerSecond> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}
impl Div<Seconds> for Flops {
    type Output = FlopsPerSecond;
    fn div(self, time: Seconds) -> FlopsPerSecond {
        FlopsPerSecond(self.0 / time.0)
    }
}
impl Div<Seconds> for Bytes {
    type Output = BytesPerSecond;
    fn div(self, time: Seconds) -> BytesPerSecond {
        BytesPerSecond(self.as_f64() / time.0)
    }
}
impl Div for Seconds {
    /// A ratio.
    type Output = f64;
    fn div(self, other: Seconds) -> f64 {
        self.0 / other.0
    }
}
impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        iter.fold(Bytes::ZERO, Add::add)
    }
}

macro_rules! real {
    ($($name:ident)*) => {$(
        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0 + other.0)
            }
        }
        impl Sub for $name {
            type Output = $name;
            fn sub(self, other: $name) -> $name {
                $name(self.0 - other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 += other.0;
            }
        }
        impl Mul<f64> for $name {
            type Output = $name;
            fn mul(self, factor: f64) -> $name {
                $name(self.0 * factor)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(iter: I) -> $name {
                $name(iter.map(|x| x.0).sum())
            }
        }
    )*};
}
real!(Seconds Flops BytesPerSecond FlopsPerSecond);

/// Three significant digits, without trailing zeros after the point.
fn digits(f: &mut fmt::Formatter<'_>, x: f64, unit: &str) -> fmt::Result {
    let places = match x.abs() {
        a if a >= 99.95 => 0,
        a if a >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{x:.places$}");
    let text = if places > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    write!(f, "{text} {unit}")
}

fn scaled(f: &mut fmt::Formatter<'_>, x: f64, units: &[(f64, &str)]) -> fmt::Result {
    let (scale, unit) =
        units.iter().find(|(s, _)| x.abs() >= *s * 0.9995).or(units.last()).copied().unwrap_or((1.0, ""));
    digits(f, x / scale, unit)
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: &[(f64, &str)] = &[
            ((1u64 << 40) as f64, "TiB"),
            ((1u64 << 30) as f64, "GiB"),
            ((1u64 << 20) as f64, "MiB"),
            (1024.0, "KiB"),
            (1.0, "B"),
        ];
        scaled(f, self.as_f64(), UNITS)
    }
}
impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])
    }
}
const DECIMAL: [f64; 5] = [1e15, 1e12, 1e9, 1e6, 1.0];
impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["PFLOP", "TFLOP", "GFLOP", "MFLOP", "FLOP"];
        scaled(f, self.0, &std::array::from_fn::<_, 5, _>(|i| (DECIMAL[i], names[i])))
    }
}
impl fmt::Display for FlopsPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"];
        scaled(f, self.0, &std::array::from_fn::<_, 5, _>(|i| (DECIMAL[i], names[i])))
    }
}
impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["PB/s", "TB/s", "GB/s", "MB/s", "B/s"];
        scaled(f, self.0, &std::array::from_fn::<_, 5, _>(|i| (DECIMAL[i], names[i])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_for_people() {
        let shown = [
            Bytes(0).to_string(),
            Bytes(1023).to_string(),
            Bytes(3_328_599_654).to_string(),
            Bytes::gib(80).to_string(),
            Seconds(0.0124).to_string(),
            Seconds(0.0).to_string(),
            Seconds(71.5).to_string(),
            Seconds(8.4e-6).to_string(),
            Seconds(0.99999).to_string(),
            Flops(1.5e12).to_string(),
            FlopsPerSecond(989e12).to_string(),
            BytesPerSecond(3.35e12).to_string(),
        ];
        let expected = [
            "0 B",
            "1023 B",
            "3.1 GiB",
            "80 GiB",
            "12.4 ms",
            "0 ns",
            "71.5 s",
            "8.4 us",
            "1 s",
            "1.5 TFLOP",
            "989 TFLOP/s",
            "3.35 TB/s",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn rates_divide_amounts() {
        assert_eq!(Bytes(600) / BytesPerSecond(300.0), Seconds(2.0));
        assert_eq!(Flops(10.0) / FlopsPerSecond(4.0), Seconds(2.5));
        assert_eq!(Flops(10.0) / Seconds(2.0), FlopsPerSecond(5.0));
        assert_eq!(Bytes(5) - Bytes(7), Bytes::ZERO);
        assert_eq!([Bytes(1), Bytes(2)].into_iter().sum::<Bytes>(), Bytes(3));
    }
}
