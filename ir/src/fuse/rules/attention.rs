//! Attention, step by step: scores, what hides some of them, softmax, product with the values.
//!
//! Smaller numbers hide too where each row sees something, see [`OUTWEIGHS`]. A number that hides is below [`HIDES`]: added to any score it gives itself, and its weight is 0. A row hidden
//! as a whole then has equal weights (`uniform`), or for -inf none: softmax gives NaN, which the fused form makes 0, as
//! exporters do by a `Where(IsNaN)` behind.

use egg::Id;

use super::super::inner;
use super::super::language::{Band, HIDES, OUTWEIGHS};
use super::super::rule::{Match, Rule, rule};
use crate::DType;
use crate::op::Op;
use crate::ops::attention::{ATTENTION, Attention, Layout};
use crate::ops::einsum::equation;

/// The same of f16, whose least number is -65504.
const HIDES_F16: f64 = -6e4;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        rule("hidden-times-low", "(Mul (Cast ?t ?hidden) ?low)", |m| {
            let hidden = m.id("?hidden");
            by_number(m, hidden, true)
        }),
        rule("unseen-times-low", "(Mul (Sub ?one (Cast ?t ?seen)) ?low)", |m| {
            m.is("?one", 1.0)?;
            let seen = m.id("?seen");
            by_number(m, seen, false)
        }),
        rule("scores", "(Einsum ?e ?q ?k)", scores),
        rule("scale-of-scores", "(Mul (Scores ?s ?q ?k) ?c)", |m| {
            let c = m.number("?c")?;
            let (settings, to) = settings(m)?;
            add_scores(m, Attention { scale: settings.scale * c, ..settings }, to, None)
        }),
        rule("cast-of-scores", "(Cast ?to (Scores ?s ?q ?k))", |m| cast(m, inner::scores, None)),
        rule("cast-of-masked-scores", "(Cast ?to (Scores ?s ?q ?k ?m))", |m| cast(m, inner::scores, Some("?m"))),
        rule("bias", "(Add (Scores ?s ?q ?k) ?bias)", |m| {
            let (settings, to) = settings(m)?;
            let bias = m.id("?bias");
            add_scores(m, settings, to, Some(bias))
        }),
        rule("constant-hiding", "(Add (Scores ?s ?q ?k) ?bias)", |m| {
            let (band, low) = m.facts(m.id("?bias")).hides.filter(|(_, low)| *low <= HIDES)?;
            let (settings, to) = settings(m)?;
            let settings = within(hiding(m, settings, low, None)?, band)?;
            add_scores(m, settings, to, None)
        }),
        rule("constant-hiding-of-biased", "(Add (Scores ?s ?q ?k ?m) ?bias)", |m| {
            let (band, low) = m.facts(m.id("?bias")).hides.filter(|(_, low)| *low <= HIDES)?;
            let (settings, to) = settings(m)?;
            let mask = m.id("?m");
            let settings = within(hiding(m, settings, low, Some(mask))?, band)?;
            add_scores(m, settings, to, Some(mask))
        }),
        rule("second-bias", "(Add (Scores ?s ?q ?k ?m) ?bias)", |m| {
            let (settings, to) = settings(m)?;
            let (mask, bias) = (m.id("?m"), m.id("?bias"));
            let both = m.apply("Add", &[mask, bias])?;
            add_scores(m, settings, to, Some(both))
        }),
        rule("add-hiding", "(Add (Scores ?s ?q ?k) (Where ?seen ?zero ?low))", |m| {
            m.is("?zero", 0.0)?;
            let (seen, low) = (m.id("?seen"), m.number("?low")?);
            hide(m, seen, low, None)
        }),
        rule("add-hiding-turned", "(Add (Scores ?s ?q ?k) (Where ?hidden ?low ?zero))", |m| {
            m.is("?zero", 0.0)?;
            let (hidden, low) = (m.id("?hidden"), m.number("?low")?);
            let seen = m.apply("Not", &[hidden])?;
            hide(m, seen, low, None)
        }),
        rule("add-hiding-to-biased", "(Add (Scores ?s ?q ?k ?m) (Where ?seen ?zero ?low))", |m| {
            m.is("?zero", 0.0)?;
            let (seen, low, mask) = (m.id("?seen"), m.number("?low")?, m.id("?m"));
            hide(m, seen, low, Some(mask))
        }),
        rule("hiding", "(Where ?seen (Scores ?s ?q ?k) ?low)", |m| {
            let (seen, low) = (m.id("?seen"), m.number("?low")?);
            hide(m, seen, low, None)
        }),
        rule("hiding-turned", "(Where ?hidden ?low (Scores ?s ?q ?k))", |m| {
            let (hidden, low) = (m.id("?hidden"), m.number("?low")?);
            let seen = m.apply("Not", &[hidden])?;
            hide(m, seen, low, None)
        }),
        rule("hiding-of-biased", "(Where ?seen (Scores ?s ?q ?k ?m) ?low)", |m| {
            let (seen, low, mask) = (m.id("?seen"), m.number("?low")?, m.id("?m"));
            hide(m, seen, low, Some(mask))
        }),
        rule("band-among-masks", "(Scores ?s ?q ?k (And ?band ?m))", |m| {
            let band = m.facts(m.id("?band")).band?;
            let mask = m.id("?m");
            seen_in(m, band, Some(mask))
        }),
        rule("band-as-mask", "(Scores ?s ?q ?k ?band)", |m| {
            let band = m.facts(m.id("?band")).band?;
            seen_in(m, band, None)
        }),
        rule("softmax-of-outweighed", "(Softmax ?a (Add (Scores ?s ?q ?k) ?bias))", |m| {
            let (band, low) = m.facts(m.id("?bias")).hides?;
            outweighed(m, band, low)
        }),
        rule("softmax-of-outweighed-where", "(Softmax ?a (Add (Scores ?s ?q ?k) (Where ?seen ?zero ?low)))", |m| {
            m.is("?zero", 0.0)?;
            by_low(m, "?seen", false)
        }),
        rule("softmax-of-outweighed-turned", "(Softmax ?a (Add (Scores ?s ?q ?k) (Where ?hidden ?low ?zero)))", |m| {
            m.is("?zero", 0.0)?;
            by_low(m, "?hidden", true)
        }),
        rule("softmax-of-low", "(Softmax ?a (Where ?seen (Scores ?s ?q ?k) ?low))", |m| by_low(m, "?seen", false)),
        rule("softmax-of-low-turned", "(Softmax ?a (Where ?hidden ?low (Scores ?s ?q ?k)))", |m| {
            by_low(m, "?hidden", true)
        }),
        rule("softmax", "(Softmax ?a (Scores ?s ?q ?k))", |m| softmax(m, None)),
        rule("softmax-of-masked", "(Softmax ?a (Scores ?s ?q ?k ?m))", |m| softmax(m, Some("?m"))),
        rule("cast-of-weights", "(Cast ?to (Weights ?s ?q ?k))", |m| cast(m, inner::weights, None)),
        rule("cast-of-masked-weights", "(Cast ?to (Weights ?s ?q ?k ?m))", |m| cast(m, inner::weights, Some("?m"))),
        rule("guard", "(Where (IsNaN (Weights ?s ?q ?k)) ?zero (Weights ?s ?q ?k))", |m| guard(m, None)),
        rule("guard-of-masked", "(Where (IsNaN (Weights ?s ?q ?k ?m)) ?zero (Weights ?s ?q ?k ?m))", |m| {
            guard(m, Some("?m"))
        }),
        rule("attention", "(Einsum ?e (Weights ?s ?q ?k) ?v)", |m| attention(m, None)),
        rule("masked-attention", "(Einsum ?e (Weights ?s ?q ?k ?m) ?v)", |m| attention(m, Some("?m"))),
        rule("attention-in-band", "(Attention ?a ?q ?k ?v ?band)", |m| {
            let band = m.facts(m.id("?band")).band?;
            seen_by_attention(m, band, None)
        }),
        rule("attention-in-band-and-mask", "(Attention ?a ?q ?k ?v (And ?band ?m))", |m| {
            let band = m.facts(m.id("?band")).band?;
            seen_by_attention(m, band, Some("?m"))
        }),
        rule("attention-hiding", "(Attention ?a ?q ?k ?v (Where ?m ?zero ?low))", |m| {
            m.is("?zero", 0.0)?;
            let low = m.number("?low").filter(|low| *low <= HIDES)?;
            let op = hiding(m, Attention::of(&m.op("?a")?), low, None)?.op(&ATTENTION);
            m.add(&op, &all_operands(m, Some("?m")))
        }),
        rule("grouped", "(Attention ?a ?q (Repeat ?r ?k) (Repeat ?r ?v))", |m| grouped(m, None)),
        rule("masked-grouped", "(Attention ?a ?q (Repeat ?r ?k) (Repeat ?r ?v) ?m)", |m| grouped(m, Some("?m"))),
        rule("rows-first", "(Attention ?a (Transpose ?p ?q) (Transpose ?p ?k) (Transpose ?p ?v))", |m| {
            rows_first(m, None)
        }),
        rule("masked-rows-first", "(Attention ?a (Transpose ?p ?q) (Transpose ?p ?k) (Transpose ?p ?v) ?m)", |m| {
            rows_first(m, Some("?m"))
        }),
    ]
}

/// `?low` where a mask is `at`, 0 elsewhere.
fn by_number(m: &mut Match<'_>, mask: Id, at: bool) -> Option<Id> {
    let low = m.number("?low").filter(|low| low.is_finite() && *low <= HIDES_F16)?;
    if m.ty(mask)?.dtype != DType::Bool {
        return None;
    }
    let dtype = m.op("?t")?.get_dtype("to")?;
    let (low, zero) = (m.scalar(dtype, low), m.scalar(dtype, 0.0));
    m.apply("Where", &if at { [mask, low, zero] } else { [mask, zero, low] })
}

/// The settings in `?s`, and the element type of the scores or weights.
fn settings(m: &Match<'_>) -> Option<(Attention, DType)> {
    let op = m.op("?s")?;
    Some((Attention::of(&op), op.get_dtype("to")?))
}

/// `bhsk,bhtk->bhst`, the operands in any order of their dims.
fn scores(m: &mut Match<'_>) -> Option<Id> {
    let e = equation(&m.op("?e")?).ok()?;
    let r = e.roles();
    let ([b, h], [s], [t], [k]) = (&r.batch[..], &r.m[..], &r.n[..], &r.k[..]) else { return None };
    if e.z != [*b, *h, *s, *t] {
        return None;
    }
    let place = |term: &[u8], letters: [u8; 4]| -> Option<Vec<usize>> {
        letters.iter().map(|l| term.iter().position(|x| x == l)).collect()
    };
    let (q_perm, k_perm) = (place(&e.x, [*b, *h, *s, *k])?, place(&e.y, [*b, *h, *t, *k])?);
    let (q, k) = (m.id("?q"), m.id("?k"));
    let dtype = m.ty(q)?.dtype;
    let (q, k) = (m.transpose(q, &q_perm)?, m.transpose(k, &k_perm)?);
    let op = inner::scores(&Attention { scale: 1.0, ..Attention::default() }, dtype);
    m.add(&op, &[q, k])
}

/// Scores of `?q` and `?k` with other settings or another mask, which is made fit.
fn add_scores(m: &mut Match<'_>, settings: Attention, to: DType, mask: Option<Id>) -> Option<Id> {
    let mut args = vec![m.id("?q"), m.id("?k")];
    if let Some(mask) = mask {
        args.push(fitting(m, args[0], mask)?);
    }
    m.add(&inner::scores(&settings, to), &args)
}

/// A mask of 4 dims, of truth values or of the element type of `q`.
fn fitting(m: &mut Match<'_>, q: Id, mask: Id) -> Option<Id> {
    let (q, ty) = (m.ty(q)?, m.ty(mask)?);
    let missing = 4usize.checked_sub(ty.rank())?;
    let dims: Vec<usize> = std::iter::repeat_n(1, missing).chain(ty.dims).collect();
    let mask = m.reshape(mask, &dims)?;
    if ty.dtype == DType::Bool || ty.dtype == q.dtype {
        return Some(mask);
    }
    let cast = Op::new(crate::ops::find("Cast")?).dtype("to", q.dtype);
    m.add(&cast, &[mask])
}

/// Scores of which only those `seen` count: others are, or have added, `low`.
fn hide(m: &mut Match<'_>, seen: Id, low: f64, mask: Option<Id>) -> Option<Id> {
    let (settings, to) = settings(m)?;
    let enough = if m.ty(m.id("?q"))?.dtype == DType::F16 { HIDES_F16 } else { HIDES };
    if low > enough {
        return None;
    }
    let settings = hiding(m, settings, low, mask)?;
    let mask = match mask {
        None => seen,
        Some(mask) if m.ty(mask)?.dtype == DType::Bool => m.apply("And", &[mask, seen])?,
        Some(bias) => {
            // A band needs no mask of its own; any other becomes part of the bias.
            if let Some(settings) = m.facts(seen).band.and_then(|b| within(settings, b)) {
                return add_scores(m, settings, to, Some(bias));
            }
            let dtype = m.ty(bias)?.dtype;
            let low = m.scalar(dtype, low);
            m.apply("Where", &[seen, bias, low])?
        }
    };
    add_scores(m, settings, to, Some(mask))
}

/// Settings under which `low` hides too. A row in which numbers of both kinds hide everything has equal weights where
/// the finite one hides alone, which no settings say.
fn hiding(m: &Match<'_>, settings: Attention, low: f64, mask: Option<Id>) -> Option<Attention> {
    let hides = settings.causal || mask.is_some_and(|mask| m.ty(mask).is_some_and(|t| t.dtype == DType::Bool));
    let uniform = low.is_finite();
    (!hides || settings.uniform == uniform).then_some(Attention { uniform, ..settings })
}

/// Settings that see a band; none where a causal mask with offset and window cannot say it.
fn within(settings: Attention, band: Band) -> Option<Attention> {
    if band == Band::ALL {
        return Some(settings);
    }
    if settings.causal || band.high < 0 || band.high == i64::MAX {
        return None;
    }
    let window = if band.low == i64::MIN {
        0
    } else {
        // An empty band hides all, which no window says.
        usize::try_from(band.high - band.low + 1).ok().filter(|w| *w > 0)?
    };
    Some(Attention { causal: true, offset: band.high as usize, window, ..settings })
}

fn seen_in(m: &mut Match<'_>, band: Band, mask: Option<Id>) -> Option<Id> {
    let (settings, to) = settings(m)?;
    let settings = within(settings, band)?;
    add_scores(m, settings, to, mask)
}

/// Softmax of scores to which a number that outweighs them is added outside a band, or that it stands for there. Only where
/// nothing else hides, and each row sees something: a row of such numbers alone would have the weights of its scores.
fn outweighed(m: &mut Match<'_>, band: Band, low: f64) -> Option<Id> {
    let (settings, to) = settings(m)?;
    let (rows, keys) = (m.ty(m.id("?q"))?.dims[2], m.ty(m.id("?k"))?.dims[2]);
    if low <= HIDES || settings.causal || rows > keys || !(band.low..=band.high).contains(&0) {
        return None;
    }
    let scores = add_scores(m, within(settings, band)?, to, None)?;
    let softmax = m.op("?a")?;
    m.add(&softmax, &[scores])
}

/// The same, for the band of a mask.
fn by_low(m: &mut Match<'_>, mask: &str, hidden: bool) -> Option<Id> {
    let low = m.number("?low").filter(|low| *low <= OUTWEIGHS)?;
    let mut mask = m.id(mask);
    if hidden {
        mask = m.apply("Not", &[mask])?;
    }
    let band = m.facts(mask).band?;
    outweighed(m, band, low)
}

/// `?q`, `?k` and the mask.
fn operands(m: &Match<'_>, mask: Option<&str>) -> Vec<Id> {
    ["?q", "?k"].into_iter().chain(mask).map(|v| m.id(v)).collect()
}

fn cast(m: &mut Match<'_>, op: fn(&Attention, DType) -> Op, mask: Option<&str>) -> Option<Id> {
    let (settings, _) = settings(m)?;
    let to = m.op("?to")?.get_dtype("to").filter(|to| to.is_float())?;
    m.add(&op(&settings, to), &operands(m, mask))
}

fn softmax(m: &mut Match<'_>, mask: Option<&str>) -> Option<Id> {
    let (settings, to) = settings(m)?;
    if m.op("?a")?.get_int("axis") != 3 {
        return None;
    }
    m.add(&inner::weights(&settings, to), &operands(m, mask))
}

fn guard(m: &mut Match<'_>, mask: Option<&str>) -> Option<Id> {
    let (settings, to) = settings(m)?;
    m.is("?zero", 0.0)?;
    m.add(&inner::weights(&settings, to), &operands(m, mask))
}

/// `bhst,bhte->bhse`, values and result in any order of their dims.
fn attention(m: &mut Match<'_>, mask: Option<&str>) -> Option<Id> {
    let e = equation(&m.op("?e")?).ok()?;
    let [b, h, s, t] = e.x[..] else { return None };
    let r = e.roles();
    let (n, k) = (&r.n[..], &r.k[..]);
    let &[size] = n else { return None };
    if k != [t] || !r.batch.contains(&b) || !r.batch.contains(&h) || r.m != [s] {
        return None;
    }
    let (settings, to) = settings(m)?;
    let (q, v) = (m.id("?q"), m.id("?v"));
    let dtype = m.ty(v)?.dtype;
    if to != dtype || m.ty(q)?.dtype != dtype {
        return None;
    }
    let v_perm: Vec<usize> = [b, h, t, size].iter().map(|l| e.y.iter().position(|x| x == l)).collect::<Option<_>>()?;
    let out_perm: Vec<usize> =
        e.z.iter().map(|l| [b, h, s, size].iter().position(|x| x == l)).collect::<Option<_>>()?;
    let v = m.transpose(v, &v_perm)?;
    let mut args = operands(m, mask);
    args.insert(2, v);
    let out = m.add(&settings.op(&ATTENTION), &args)?;
    m.transpose(out, &out_perm)
}

/// `?q`, `?k`, `?v` and the mask.
fn all_operands(m: &Match<'_>, mask: Option<&str>) -> Vec<Id> {
    ["?q", "?k", "?v"].into_iter().chain(mask).map(|v| m.id(v)).collect()
}

fn seen_by_attention(m: &mut Match<'_>, band: Band, mask: Option<&str>) -> Option<Id> {
    let a = within(Attention::of(&m.op("?a")?), band)?;
    m.add(&a.op(&ATTENTION), &all_operands(m, mask))
}

/// Repeated heads of keys and values are grouped queries.
fn grouped(m: &mut Match<'_>, mask: Option<&str>) -> Option<Id> {
    let a = m.op("?a")?;
    if m.op("?r")?.get_int("dim") as usize != 1 || Attention::of(&a).layout != Layout::Bhsd {
        return None;
    }
    m.add(&a, &all_operands(m, mask))
}

fn rows_first(m: &mut Match<'_>, mask: Option<&str>) -> Option<Id> {
    let a = Attention::of(&m.op("?a")?);
    let swap = [0, 2, 1, 3];
    if m.perm("?p")? != swap || a.layout != Layout::Bhsd {
        return None;
    }
    let op = Attention { layout: Layout::Bshd, ..a }.op(&ATTENTION);
    let out = m.add(&op, &all_operands(m, mask))?;
    m.transpose(out, &swap)
}
