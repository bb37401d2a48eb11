//! Conversion between element types.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::tensor::{Tensor, Type};

/// Elements of any type as f64 (i64 beyond 2^53 are rounded).
pub fn to_f64(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn each<T: bytemuck::Pod>(b: &[u8], f: impl Fn(T) -> f64) -> Vec<f64> {
        b.chunks_exact(size_of::<T>()).map(|c| f(bytemuck::pod_read_unaligned(c))).collect()
    }
    match dtype {
        DType::F64 => each(bytes, |x: f64| x),
        DType::F32 => each(bytes, |x: f32| x.into()),
        DType::F16 => each(bytes, |x: f16| x.to_f64()),
        DType::Bf16 => each(bytes, |x: bf16| x.to_f64()),
        DType::I64 => each(bytes, |x: i64| x as f64),
        DType::I32 => each(bytes, |x: i32| x.into()),
        DType::I8 => each(bytes, |x: i8| x.into()),
        DType::U8 | DType::Bool => each(bytes, |x: u8| x.into()),
    }
}

/// Writes f64 elements as another type: floats round, integers truncate and saturate, bool is `x != 0`.
pub fn from_f64(dtype: DType, elements: impl Iterator<Item = f64>, out: &mut [u8]) {
    fn each<T: bytemuck::Pod>(xs: impl Iterator<Item = f64>, out: &mut [u8], f: impl Fn(f64) -> T) {
        for (c, x) in out.chunks_exact_mut(size_of::<T>()).zip(xs) {
            c.copy_from_slice(bytemuck::bytes_of(&f(x)));
        }
    }
    match dtype {
        DType::F64 => each(elements, out, |x| x),
        DType::F32 => each(elements, out, |x| x as f32),
        DType::F16 => each(elements, out, f16::from_f64),
        DType::Bf16 => each(elements, out, bf16::from_f64),
        DType::I64 => each(elements, out, |x| x as i64),
        DType::I32 => each(elements, out, |x| x as i32),
        DType::I8 => each(elements, out, |x| x as i8),
        DType::U8 => each(elements, out, |x| x as u8),
        DType::Bool => each(elements, out, |x| u8::from(x != 0.0)),
    }
}

/// A tensor converted to another element type.
pub fn cast(t: &Tensor, dtype: DType) -> Tensor {
    let mut out = Tensor::zeros(Type::new(dtype, t.dims()));
    from_f64(dtype, to_f64(t.dtype(), t.bytes()).into_iter(), out.bytes_mut());
    out
}

/// A scalar of any element type.
pub fn scalar(dtype: DType, x: f64) -> Tensor {
    let mut out = Tensor::zeros(Type::new(dtype, []));
    from_f64(dtype, std::iter::once(x), out.bytes_mut());
    out
}
