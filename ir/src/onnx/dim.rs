//! Sizes as exporters write them: integers, symbols, and expressions over symbols.
//!
//! The grammar is what SymPy prints: `+ - * / // % **`, parentheses, and `Min Max floor ceiling Mod FloorDiv CeilToInt`. Division
//! by `/` is exact (`floor(height/2 - 1/2)`), so expressions are evaluated in fractions and the result must be an
//! integer. A text that is no expression (`image size`) is one symbol.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Texts longer than this, or nested deeper than [`MAX_DEPTH`], are one symbol.
const MAX_LENGTH: usize = 4096;
const MAX_DEPTH: usize = 64;

/// A size: an expression over named symbols.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// An integer.
    Int(i64),
    /// A symbol.
    Symbol(String),
    /// An operator applied to two expressions.
    Binary(BinaryOp, Box<Dim>, Box<Dim>),
    /// Rounded down.
    Floor(Box<Dim>),
    /// Rounded up.
    Ceil(Box<Dim>),
}

/// A binary operator of a size expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
    Min,
    Max,
}

/// Why an expression has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DimError {
    /// A symbol without a binding.
    #[error("`{0}` is not bound")]
    Unbound(String),
    /// The value is no size.
    #[error("{0}")]
    NoSize(String),
}

/// A fraction; the denominator is positive.
#[derive(Clone, Copy)]
struct Fraction {
    num: i128,
    den: i128,
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Fraction {
    fn new(num: i128, den: i128) -> Option<Fraction> {
        if den == 0 {
            return None;
        }
        let g = gcd(num.checked_abs()?, den.checked_abs()?).max(1);
        let sign = if den < 0 { -1 } else { 1 };
        Some(Fraction { num: sign * num / g, den: sign * den / g })
    }
    fn int(x: i128) -> Fraction {
        Fraction { num: x, den: 1 }
    }
    fn floor(self) -> i128 {
        self.num.div_euclid(self.den)
    }
    fn binary(op: BinaryOp, a: Fraction, b: Fraction) -> Option<Fraction> {
        let cross = |x: Fraction, y: Fraction| x.num.checked_mul(y.den);
        match op {
            BinaryOp::Add => Fraction::new(cross(a, b)?.checked_add(cross(b, a)?)?, a.den.checked_mul(b.den)?),
            BinaryOp::Sub => Fraction::new(cross(a, b)?.checked_sub(cross(b, a)?)?, a.den.checked_mul(b.den)?),
            BinaryOp::Mul => Fraction::new(a.num.checked_mul(b.num)?, a.den.checked_mul(b.den)?),
            BinaryOp::Div => Fraction::new(cross(a, b)?, cross(b, a)?),
            BinaryOp::FloorDiv => Some(Fraction::int(Fraction::binary(BinaryOp::Div, a, b)?.floor())),
            BinaryOp::Mod => {
                let whole = Fraction::binary(BinaryOp::FloorDiv, a, b)?;
                Fraction::binary(BinaryOp::Sub, a, Fraction::binary(BinaryOp::Mul, whole, b)?)
            }
            BinaryOp::Pow => {
                let n = u32::try_from(b.num).ok().filter(|&n| b.den == 1 && n <= 64)?;
                Fraction::new(a.num.checked_pow(n)?, a.den.checked_pow(n)?)
            }
            BinaryOp::Min => Some(if cross(a, b)? <= cross(b, a)? { a } else { b }),
            BinaryOp::Max => Some(if cross(a, b)? >= cross(b, a)? { a } else { b }),
        }
    }
}

impl Dim {
    /// Reads a size as exporters write it. Always succeeds: a text that is no expression is one symbol.
    pub fn parse(text: &str) -> Dim {
        let text = text.trim();
        let parse = || {
            let tokens = tokens(text)?;
            let mut parser = Parser { tokens: &tokens, depth: 0 };
            let dim = parser.sum()?;
            parser.tokens.is_empty().then_some(dim)
        };
        (text.len() <= MAX_LENGTH).then(parse).flatten().unwrap_or_else(|| Dim::Symbol(text.to_string()))
    }

    /// The symbols that occur.
    pub fn symbols(&self) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        self.collect(&mut found);
        found
    }

    fn collect<'a>(&'a self, found: &mut BTreeSet<&'a str>) {
        match self {
            Dim::Int(_) => {}
            Dim::Symbol(name) => {
                found.insert(name);
            }
            Dim::Binary(_, a, b) => {
                a.collect(found);
                b.collect(found);
            }
            Dim::Floor(a) | Dim::Ceil(a) => a.collect(found),
        }
    }

    /// Its value under bindings.
    ///
    /// # Errors
    /// A symbol that is not bound; a value that is negative, not whole or out of range.
    pub fn eval(&self, bindings: &BTreeMap<String, usize>) -> Result<usize, DimError> {
        let value = self.fraction(bindings)?;
        if value.den != 1 {
            return Err(DimError::NoSize(format!("`{self}` is {}/{}, not a whole number", value.num, value.den)));
        }
        usize::try_from(value.num).map_err(|_| DimError::NoSize(format!("`{self}` is {}, not a size", value.num)))
    }

    fn fraction(&self, bindings: &BTreeMap<String, usize>) -> Result<Fraction, DimError> {
        match self {
            Dim::Int(x) => Ok(Fraction::int((*x).into())),
            Dim::Symbol(name) => match bindings.get(name) {
                Some(&n) => Ok(Fraction::int(n as i128)),
                None => Err(DimError::Unbound(name.clone())),
            },
            Dim::Binary(op, a, b) => {
                let (a, b) = (a.fraction(bindings)?, b.fraction(bindings)?);
                Fraction::binary(*op, a, b)
                    .ok_or_else(|| DimError::NoSize(format!("`{self}` divides by zero or is out of range")))
            }
            Dim::Floor(a) => Ok(Fraction::int(a.fraction(bindings)?.floor())),
            Dim::Ceil(a) => {
                let a = a.fraction(bindings)?;
                Ok(Fraction::int(a.floor() + i128::from(a.den != 1)))
            }
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Binding strength, for parentheses.
        fn level(d: &Dim) -> u8 {
            match d {
                Dim::Binary(BinaryOp::Add | BinaryOp::Sub, ..) => 1,
                Dim::Binary(BinaryOp::Mul | BinaryOp::Div | BinaryOp::FloorDiv | BinaryOp::Mod, ..) => 2,
                Dim::Binary(BinaryOp::Pow, ..) => 3,
                _ => 4,
            }
        }
        let side = |f: &mut fmt::Formatter<'_>, d: &Dim, least: u8| {
            if level(d) < least { write!(f, "({d})") } else { write!(f, "{d}") }
        };
        match self {
            Dim::Int(x) => write!(f, "{x}"),
            Dim::Symbol(name) => f.write_str(name),
            Dim::Floor(a) => write!(f, "floor({a})"),
            Dim::Ceil(a) => write!(f, "ceiling({a})"),
            Dim::Binary(BinaryOp::Min, a, b) => write!(f, "Min({a}, {b})"),
            Dim::Binary(BinaryOp::Max, a, b) => write!(f, "Max({a}, {b})"),
            Dim::Binary(op, a, b) => {
                let word = match op {
                    BinaryOp::Add => " + ",
                    BinaryOp::Sub => " - ",
                    BinaryOp::Mul => "*",
                    BinaryOp::Div => "/",
                    BinaryOp::FloorDiv => "//",
                    BinaryOp::Mod => "%",
                    _ => "**",
                };
                let at = level(self);
                side(f, a, at)?;
                f.write_str(word)?;
                side(f, b, at + 1)
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Int(i64),
    Name(String),
    Sign(&'static str),
}

fn tokens(text: &str) -> Option<Vec<Token>> {
    const SIGNS: [&str; 10] = ["**", "//", "+", "-", "*", "/", "%", "(", ")", ","];
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if c.is_whitespace() {
            rest = &rest[c.len_utf8()..];
        } else if let Some(sign) = SIGNS.into_iter().find(|s| rest.starts_with(s)) {
            found.push(Token::Sign(sign));
            rest = &rest[sign.len()..];
        } else {
            let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ':');
            let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            if name.is_empty() {
                return None;
            }
            found.push(match name.parse() {
                Ok(x) => Token::Int(x),
                Err(_) if name.starts_with(|c: char| c.is_alphabetic() || c == '_') => Token::Name(name.to_string()),
                Err(_) => return None,
            });
            rest = after;
        }
    }
    Some(found)
}

struct Parser<'a> {
    tokens: &'a [Token],
    depth: usize,
}

impl Parser<'_> {
    fn eat(&mut self, sign: &str) -> Option<()> {
        match self.tokens.split_first() {
            Some((Token::Sign(s), rest)) if *s == sign => {
                self.tokens = rest;
                Some(())
            }
            _ => None,
        }
    }

    fn chain(&mut self, ops: &[(&str, BinaryOp)], next: fn(&mut Self) -> Option<Dim>) -> Option<Dim> {
        let mut left = next(self)?;
        // A long chain is as deep a tree as nested parentheses.
        let mut links = 0;
        while let Some((_, op)) = ops.iter().find(|(sign, _)| self.eat(sign).is_some()) {
            links += 1;
            if links > MAX_DEPTH {
                return None;
            }
            left = Dim::Binary(*op, Box::new(left), Box::new(next(self)?));
        }
        Some(left)
    }

    fn sum(&mut self) -> Option<Dim> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let dim = self.chain(&[("+", BinaryOp::Add), ("-", BinaryOp::Sub)], Self::product);
        self.depth -= 1;
        dim
    }

    fn product(&mut self) -> Option<Dim> {
        let ops = [("*", BinaryOp::Mul), ("//", BinaryOp::FloorDiv), ("/", BinaryOp::Div), ("%", BinaryOp::Mod)];
        self.chain(&ops, Self::unary)
    }

    fn unary(&mut self) -> Option<Dim> {
        let mut negative = false;
        while self.eat("-").is_some() {
            negative = !negative;
        }
        let dim = self.chain(&[("**", BinaryOp::Pow)], Self::atom)?;
        Some(match dim {
            Dim::Int(x) if negative => Dim::Int(-x),
            dim if negative => Dim::Binary(BinaryOp::Sub, Box::new(Dim::Int(0)), Box::new(dim)),
            dim => dim,
        })
    }

    fn atom(&mut self) -> Option<Dim> {
        if self.eat("(").is_some() {
            let dim = self.sum()?;
            return self.eat(")").map(|()| dim);
        }
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        match first {
            Token::Int(x) => Some(Dim::Int(*x)),
            Token::Sign(_) => None,
            Token::Name(name) if self.eat("(").is_some() => {
                let mut args = vec![self.sum()?];
                while self.eat(",").is_some() {
                    args.push(self.sum()?);
                }
                self.eat(")")?;
                call(name, args)
            }
            Token::Name(name) => Some(Dim::Symbol(name.clone())),
        }
    }
}

fn call(name: &str, args: Vec<Dim>) -> Option<Dim> {
    let n = args.len();
    let mut args = args.into_iter();
    let op = match name {
        "Min" | "min" => BinaryOp::Min,
        "Max" | "max" => BinaryOp::Max,
        "Mod" if n == 2 => BinaryOp::Mod,
        "FloorDiv" if n == 2 => BinaryOp::FloorDiv,
        "floor" | "FloorToInt" if n == 1 => return Some(Dim::Floor(Box::new(args.next()?))),
        "ceiling" | "CeilToInt" if n == 1 => return Some(Dim::Ceil(Box::new(args.next()?))),
        _ => return None,
    };
    let first = args.next()?;
    (n <= MAX_DEPTH).then(|| args.fold(first, |a, b| Dim::Binary(op, Box::new(a), Box::new(b))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_of_exporters_have_their_values() {
        let bound: BTreeMap<String, usize> =
            [("batch", 3), ("sequence", 10), ("past_sequence", 7), ("height", 15), ("s70", 4), ("kv.dim", 5)]
                .map(|(k, v)| (k.to_string(), v))
                .into();
        for (text, value, printed) in [
            ("sequence", 10, "sequence"),
            ("16", 16, "16"),
            ("past_sequence + sequence", 17, "past_sequence + sequence"),
            ("Min(128, sequence)", 10, "Min(128, sequence)"),
            ("Max(1, 2, sequence)", 10, "Max(Max(1, 2), sequence)"),
            ("((batch*sequence)//batch)", 10, "batch*sequence//batch"),
            ("((sequence**2)//sequence)", 10, "sequence**2//sequence"),
            ("floor(height/2 - 1/2) + 1", 8, "floor(height/2 - 1/2) + 1"),
            ("2*s70*sequence", 80, "2*s70*sequence"),
            ("-(batch - 4) + kv.dim", 6, "0 - (batch - 4) + kv.dim"),
            ("ceiling(sequence/4)", 3, "ceiling(sequence/4)"),
            ("sequence % batch", 1, "sequence%batch"),
            ("2 - -3", 5, "2 - -3"),
        ] {
            let dim = Dim::parse(text);
            assert_eq!(dim.eval(&bound), Ok(value), "{text}");
            assert_eq!(dim.to_string(), printed);
        }
    }

    #[test]
    fn what_is_no_expression_is_a_symbol() {
        for text in ["image size", "a +", "(a", "f(x)", "", "é=3", "1a", &"(".repeat(500), &"-1+".repeat(5000)] {
            assert_eq!(Dim::parse(text), Dim::Symbol(text.trim().to_string()));
        }
    }

    #[test]
    fn values_that_are_no_sizes_are_refused() {
        let bound: BTreeMap<String, usize> = [("a".to_string(), 3), ("big".to_string(), usize::MAX)].into();
        for text in ["a - 4", "a/2", "a//0", "a % 0", "big**40", "big*big*big", "9223372036854775807**3"] {
            assert!(matches!(Dim::parse(text).eval(&bound), Err(DimError::NoSize(_))), "{text}");
        }
        assert_eq!(Dim::parse("a + b").eval(&bound), Err(DimError::Unbound("b".to_string())));
    }
}
