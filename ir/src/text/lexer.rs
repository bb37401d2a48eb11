//! Words of the textual form, with their places.

use super::parser::ParseError;

/// A word.
#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    /// A keyword, operator or type name: letters, digits, `_`.
    Word(String),
    /// `%name`.
    Value(String),
    /// A number as written, with its sign; also `inf`, `-inf`, `nan`.
    Number(String),
    /// A string, unescaped.
    Text(String),
    /// One of `{ } [ ] ( ) = : ,`, or `->`.
    Mark(&'static str),
    /// The end of the text.
    End,
}

impl Token {
    /// As named in errors.
    pub fn show(&self) -> String {
        match self {
            Token::Word(w) | Token::Number(w) => format!("`{w}`"),
            Token::Value(v) => format!("`%{v}`"),
            Token::Text(t) => format!("{t:?}"),
            Token::Mark(m) => format!("`{m}`"),
            Token::End => "the end of the text".into(),
        }
    }
}

/// A word and where it starts, both counted from 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub token: Token,
    pub line: usize,
    pub column: usize,
}

const MARKS: [&str; 10] = ["->", "{", "}", "[", "]", "(", ")", "=", ":", ","];

/// Cuts a text into words; the last is [`Token::End`].
pub fn lex(text: &str) -> Result<Vec<Placed>, ParseError> {
    let mut tokens = Vec::new();
    let mut line = 1;
    for (n, content) in text.split('\n').enumerate() {
        line = n + 1;
        let mut rest = content;
        loop {
            rest = rest.trim_start();
            if rest.is_empty() || rest.starts_with('#') {
                break;
            }
            let column = content[..content.len() - rest.len()].chars().count() + 1;
            let (token, length) = word(rest).map_err(|expected| ParseError {
                line,
                column,
                expected: expected.into(),
                found: rest.chars().next().map(|c| format!("`{c}`")).unwrap_or_default(),
            })?;
            tokens.push(Placed { token, line, column });
            rest = &rest[length..];
        }
    }
    let column = text.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
    tokens.push(Placed { token: Token::End, line, column });
    Ok(tokens)
}

fn span(s: &str, keep: impl Fn(char) -> bool) -> usize {
    s.find(|c| !keep(c)).unwrap_or(s.len())
}

/// The word at the start of a text that is not blank, and its length in bytes; or what was expected.
fn word(s: &str) -> Result<(Token, usize), &'static str> {
    for m in MARKS {
        if s.starts_with(m) {
            return Ok((Token::Mark(m), m.len()));
        }
    }
    let name = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let first = s.chars().next().unwrap_or(' ');
    if first == '"' {
        return string(s).ok_or("a string that ends on its line, with escapes as in Rust");
    }
    if let Some(rest) = s.strip_prefix('%') {
        let n = span(rest, name);
        return if n == 0 { Err("a value's name behind `%`") } else { Ok((Token::Value(rest[..n].into()), n + 1)) };
    }
    let unsigned = s.strip_prefix('-').unwrap_or(s);
    let sign = s.len() - unsigned.len();
    if unsigned.starts_with(|c: char| c.is_ascii_digit()) {
        let mut n = span(unsigned, |c| c.is_ascii_alphanumeric() || c == '.');
        // The sign of an exponent belongs to the number.
        if unsigned[..n].ends_with(['e', 'E']) && unsigned[n..].starts_with(['-', '+']) {
            n += 1 + span(&unsigned[n + 1..], |c| c.is_ascii_digit());
        }
        return Ok((Token::Number(s[..sign + n].into()), sign + n));
    }
    let n = span(unsigned, name);
    match &s[..sign + n] {
        w @ ("inf" | "-inf" | "nan" | "NaN") => Ok((Token::Number(w.into()), w.len())),
        w if sign == 0 && n > 0 => Ok((Token::Word(w.into()), n)),
        _ => Err("a word, a value, a number, a string or a mark"),
    }
}

/// Reads a string in the form of Rust's `{:?}`.
fn string(s: &str) -> Option<(Token, usize)> {
    let mut out = String::new();
    let mut chars = s.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((Token::Text(out), at + 1)),
            '\\' => match chars.next()?.1 {
                'n' => out.push('\n'),
                't' => out.push('\t'),
                'r' => out.push('\r'),
                '0' => out.push('\0'),
                'u' => {
                    (chars.next()?.1 == '{').then_some(())?;
                    let code: String = chars.by_ref().map(|(_, c)| c).take_while(|c| *c != '}').collect();
                    out.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
                }
                c @ ('"' | '\\' | '\'') => out.push(c),
                _ => return None,
            },
            c => out.push(c),
        }
    }
    None
}
