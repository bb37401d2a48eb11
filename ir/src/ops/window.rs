//! Sliding windows of convolutions and pools: sizes, strides, padding, and their ONNX attributes.
//!
//! Spatial dims are at most 3; a window of fewer is one of 3 whose leading sizes are 1.

use crate::onnx::import::ImportCx;
use crate::op::{AttrKind, Op, OpError};

/// The most spatial dims.
pub(crate) const MAX_SPATIAL: usize = 3;

/// Attributes that a convolution takes.
pub(crate) const CONV_ATTRS: &[(&str, AttrKind)] =
    &[("strides", AttrKind::Ints), ("pads", AttrKind::Ints), ("dilations", AttrKind::Ints)];
/// Attributes that the gradients of a convolution take: also the sizes of their result.
pub(crate) const CONV_GRAD_ATTRS: &[(&str, AttrKind)] =
    &[("strides", AttrKind::Ints), ("pads", AttrKind::Ints), ("dilations", AttrKind::Ints), ("dims", AttrKind::Ints)];
/// Attributes that a pool takes.
pub(crate) const POOL_ATTRS: &[(&str, AttrKind)] = &[
    ("kernel", AttrKind::Ints),
    ("strides", AttrKind::Ints),
    ("pads", AttrKind::Ints),
    ("dilations", AttrKind::Ints),
    ("ceil", AttrKind::Bool),
    ("count_pad", AttrKind::Bool),
];
/// Attributes that the gradient of an average pool takes.
pub(crate) const POOL_GRAD_ATTRS: &[(&str, AttrKind)] = &[
    ("kernel", AttrKind::Ints),
    ("strides", AttrKind::Ints),
    ("pads", AttrKind::Ints),
    ("dilations", AttrKind::Ints),
    ("ceil", AttrKind::Bool),
    ("count_pad", AttrKind::Bool),
    ("dims", AttrKind::Ints),
];

/// A window over `n` spatial dims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub kernel: Vec<usize>,
    pub strides: Vec<usize>,
    /// Padding before, per dim.
    pub before: Vec<usize>,
    /// Padding behind, per dim.
    pub behind: Vec<usize>,
    pub dilations: Vec<usize>,
    /// Round the number of places up.
    pub ceil: bool,
}

/// The largest kernel size, stride, padding or dilation: products of two stay far from overflow.
const LARGEST: usize = 1 << 31;

/// A size in range.
fn plain(x: i64) -> Option<usize> {
    usize::try_from(x).ok().filter(|&x| x <= LARGEST)
}

fn kernel_in_range(kernel: &[usize]) -> Result<(), OpError> {
    match kernel.iter().find(|&&k| k > LARGEST) {
        Some(k) => Err(OpError(format!("a kernel of size {k}; sizes beyond 2^31 are not supported"))),
        None => Ok(()),
    }
}

impl Window {
    /// Of an operator's attributes; a convolution's kernel sizes are those of its weight.
    pub fn of(op: &Op, kernel: Option<&[usize]>) -> Result<Window, OpError> {
        let list = |name: &str| -> Result<Vec<usize>, OpError> {
            let one = |&x: &i64| {
                plain(x).ok_or_else(|| OpError(format!("{}: `{name}` holds {x}, which is out of range", op.name())))
            };
            op.get_ints(name).iter().map(one).collect()
        };
        let kernel = match kernel {
            Some(k) => {
                kernel_in_range(k)?;
                k.to_vec()
            }
            None => list("kernel")?,
        };
        let n = kernel.len();
        let (strides, pads, dilations) = (list("strides")?, list("pads")?, list("dilations")?);
        if n == 0 || n > MAX_SPATIAL {
            return Err(OpError(format!("{} over {n} spatial dims; 1 to {MAX_SPATIAL} are supported", op.name())));
        }
        if (strides.len(), pads.len(), dilations.len()) != (n, 2 * n, n) {
            return Err(OpError(format!("{op}: attributes do not fit {n} spatial dims")));
        }
        if kernel.iter().chain(&strides).chain(&dilations).any(|&x| x == 0) {
            return Err(OpError(format!("{op}: a kernel size, stride or dilation is 0 (kernel {kernel:?})")));
        }
        let (before, behind) = (pads[..n].to_vec(), pads[n..].to_vec());
        Ok(Window { kernel, strides, before, behind, dilations, ceil: op.get_flag("ceil") })
    }

    /// As attributes.
    pub fn set(&self, op: Op) -> Op {
        let list = |x: &[usize]| x.iter().map(|&x| x as i64).collect::<Vec<_>>();
        op.ints("strides", list(&self.strides))
            .ints("pads", list(&[&self.before[..], &self.behind[..]].concat()))
            .ints("dilations", list(&self.dilations))
    }

    /// The extent of a window along a dim.
    pub fn reach(&self, d: usize) -> usize {
        self.dilations[d] * (self.kernel[d] - 1) + 1
    }

    /// The number of places per dim, of input sizes.
    pub fn places(&self, input: &[usize]) -> Result<Vec<usize>, OpError> {
        (0..self.kernel.len())
            .map(|d| {
                let extent = self.reach(d);
                let padded = input[d] + self.before[d] + self.behind[d];
                let room = padded.checked_sub(extent).ok_or_else(|| {
                    OpError(format!(
                        "a window of extent {extent} does not fit size {padded} (with padding) of spatial dim {d}"
                    ))
                })?;
                let places = if self.ceil { room.div_ceil(self.strides[d]) } else { room / self.strides[d] } + 1;
                // A window that starts in the padding behind is none.
                let last = (places - 1) * self.strides[d];
                Ok(if self.ceil && last >= input[d] + self.before[d] { places - 1 } else { places })
            })
            .collect()
    }

    /// Reads `strides`, `pads`, `auto_pad`, `dilations`, `ceil_mode` of a node.
    pub fn import(cx: &ImportCx<'_>, input: &[usize], kernel: &[usize]) -> Result<Window, OpError> {
        kernel_in_range(kernel)?;
        let n = kernel.len();
        let list = |name: &str, count: usize, default: usize| -> Result<Vec<usize>, OpError> {
            let Some(xs) = cx.attr_ints(name) else { return Ok(vec![default; count]) };
            if xs.len() != count {
                return Err(OpError(format!("`{name}` has {} entries, not {count}", xs.len())));
            }
            let one = |&x: &i64| {
                plain(x).ok_or_else(|| {
                    OpError(format!("`{name}` holds {x}; values below 0 or beyond 2^31 are not supported"))
                })
            };
            xs.iter().map(one).collect()
        };
        let (strides, dilations) = (list("strides", n, 1)?, list("dilations", n, 1)?);
        let (mut before, mut behind) = (vec![0; n], vec![0; n]);
        match cx.attr_str("auto_pad").unwrap_or("NOTSET") {
            "NOTSET" | "" => {
                let pads = list("pads", 2 * n, 0)?;
                before.copy_from_slice(&pads[..n]);
                behind.copy_from_slice(&pads[n..]);
            }
            "VALID" => {}
            mode @ ("SAME_UPPER" | "SAME_LOWER") => {
                for d in 0..n {
                    let places = input[d].div_ceil(strides[d].max(1));
                    let covered =
                        places.saturating_sub(1) * strides[d] + dilations[d] * kernel[d].saturating_sub(1) + 1;
                    let total = covered.saturating_sub(input[d]);
                    let (less, more) = (total / 2, total - total / 2);
                    (before[d], behind[d]) = if mode == "SAME_UPPER" { (less, more) } else { (more, less) };
                }
            }
            other => {
                return Err(OpError(format!("auto_pad `{other}` is none of NOTSET, VALID, SAME_UPPER, SAME_LOWER")));
            }
        }
        let ceil = cx.attr_int("ceil_mode", 0) != 0;
        Ok(Window { kernel: kernel.to_vec(), strides, before, behind, dilations, ceil })
    }

    /// As loops over 3 dims.
    pub fn loops(&self, input: &[usize], output: &[usize]) -> WindowLoops {
        let three = |x: &[usize], fill: usize| {
            let mut out = [fill; MAX_SPATIAL];
            out[MAX_SPATIAL - x.len()..].copy_from_slice(x);
            out
        };
        WindowLoops {
            input: three(input, 1),
            output: three(output, 1),
            kernel: three(&self.kernel, 1),
            stride: three(&self.strides, 1),
            before: three(&self.before, 0),
            behind: three(&self.behind, 0),
            dilation: three(&self.dilations, 1),
        }
    }
}

/// A window over 3 spatial dims with all sizes known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowLoops {
    pub input: [usize; 3],
    pub output: [usize; 3],
    pub kernel: [usize; 3],
    pub stride: [usize; 3],
    pub before: [usize; 3],
    pub behind: [usize; 3],
    pub dilation: [usize; 3],
}

impl WindowLoops {
    /// Elements of one channel of the input.
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }
    /// Elements of one channel of the output.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }
    /// Elements of the kernel.
    pub fn kernel_len(&self) -> usize {
        self.kernel.iter().product()
    }
    /// The place in the input that output place `o` and kernel place `k` of a dim meet at, if not padding.
    #[inline]
    pub fn at(&self, d: usize, o: usize, k: usize) -> Option<usize> {
        (o * self.stride[d] + k * self.dilation[d]).checked_sub(self.before[d]).filter(|&i| i < self.input[d])
    }
    /// Output places `from..to` of the last dim whose input, for kernel place `k`, is not padding.
    pub fn row(&self, k: usize) -> (usize, usize) {
        let shift = k * self.dilation[2];
        let from = self.before[2].saturating_sub(shift).div_ceil(self.stride[2]);
        let to = (self.input[2] + self.before[2]).saturating_sub(shift).div_ceil(self.stride[2]);
        let to = to.min(self.output[2]);
        (from.min(to), to)
    }
    /// Calls `f` with each input place (within a channel) that the window at output place `o` covers.
    pub fn window(&self, o: [usize; 3], mut f: impl FnMut(usize)) {
        for k0 in 0..self.kernel[0] {
            let Some(i0) = self.at(0, o[0], k0) else { continue };
            for k1 in 0..self.kernel[1] {
                let Some(i1) = self.at(1, o[1], k1) else { continue };
                for k2 in 0..self.kernel[2] {
                    let Some(i2) = self.at(2, o[2], k2) else { continue };
                    f((i0 * self.input[1] + i1) * self.input[2] + i2);
                }
            }
        }
    }
    /// All output places, row-major.
    pub fn places(self) -> impl Iterator<Item = [usize; 3]> {
        let [a, b, c] = self.output;
        (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
    }
}
