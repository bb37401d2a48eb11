//! Tensors as text: see the module above for the forms.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::tensor::{Tensor, Type};

use super::{HEX_LIMIT, LIST_LIMIT};

/// The text of a tensor, without its type.
pub fn show(t: &Tensor) -> String {
    let size = t.dtype().size();
    let bytes = t.bytes();
    let first = bytes.get(..size);
    let element = |b: &[u8]| {
        let text = show_element(t.dtype(), b);
        // A NaN with a payload has no decimal form.
        (parse_element(t.dtype(), &text).as_deref() == Some(b)).then_some(text)
    };
    if t.ty().rank() == 0
        && let Some(text) = element(bytes)
    {
        return text;
    }
    if let Some(text) =
        first.filter(|f| t.ty().numel() > 1 && bytes.chunks_exact(size).all(|c| c == *f)).and_then(element)
    {
        return format!("splat({text})");
    }
    if t.ty().numel() <= LIST_LIMIT
        && let Some(list) = bytes.chunks_exact(size).map(element).collect::<Option<Vec<_>>>()
    {
        return format!("[{}]", list.join(", "));
    }
    if bytes.len() <= HEX_LIMIT {
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        return format!("hex \"{hex}\"");
    }
    use sha2::Digest;
    let digest = sha2::Sha256::digest(bytes);
    let short: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("elided \"sha256:{short}\"")
}

fn show_element(dtype: DType, b: &[u8]) -> String {
    use bytemuck::pod_read_unaligned as read;
    let float = |x: f64, text: String| if x.is_nan() { "nan".into() } else { text };
    match dtype {
        DType::F64 => float(read(b), format!("{:?}", read::<f64>(b))),
        DType::F32 => float(read::<f32>(b).into(), format!("{:?}", read::<f32>(b))),
        DType::F16 => float(read::<f16>(b).into(), format!("{:?}", read::<f16>(b).to_f32())),
        DType::Bf16 => float(read::<bf16>(b).into(), format!("{:?}", read::<bf16>(b).to_f32())),
        DType::I64 => read::<i64>(b).to_string(),
        DType::I32 => read::<i32>(b).to_string(),
        DType::I8 => read::<i8>(b).to_string(),
        DType::U8 => b[0].to_string(),
        DType::Bool if b[0] <= 1 => (b[0] == 1).to_string(),
        DType::Bool => b[0].to_string(),
    }
}

/// The bytes of an element written as a number or word.
pub fn parse_element(dtype: DType, text: &str) -> Option<Vec<u8>> {
    fn bytes<T: bytemuck::Pod>(x: T) -> Vec<u8> {
        bytemuck::bytes_of(&x).to_vec()
    }
    match dtype {
        DType::F64 => text.parse().ok().map(bytes::<f64>),
        DType::F32 => text.parse().ok().map(bytes::<f32>),
        DType::F16 => text.parse().ok().map(|x| bytes(f16::from_f64(x))),
        DType::Bf16 => text.parse().ok().map(|x| bytes(bf16::from_f64(x))),
        DType::I64 => text.parse().ok().map(bytes::<i64>),
        DType::I32 => text.parse().ok().map(bytes::<i32>),
        DType::I8 => text.parse().ok().map(bytes::<i8>),
        DType::U8 => text.parse().ok().map(bytes::<u8>),
        DType::Bool => text.parse::<bool>().ok().map(|x| vec![u8::from(x)]),
    }
}

/// The tensor of elements in order.
pub fn of_elements(ty: &Type, elements: &[String]) -> Result<Tensor, String> {
    if elements.len() != ty.numel() {
        return Err(format!("{} elements for {ty}", ty.numel()));
    }
    let mut data = Vec::with_capacity(ty.bytes());
    for e in elements {
        data.extend(parse_element(ty.dtype, e).ok_or_else(|| format!("an element of {}, not `{e}`", ty.dtype))?);
    }
    Tensor::from_bytes(ty.clone(), &data).ok_or_else(|| format!("elements of {ty}"))
}

/// The tensor of bytes in hexadecimal.
pub fn of_hex(ty: &Type, hex: &str) -> Result<Tensor, String> {
    let want = || format!("{} bytes in hexadecimal for {ty}", ty.bytes());
    if hex.len() != 2 * ty.bytes() || !hex.is_ascii() {
        return Err(want());
    }
    let data: Option<Vec<u8>> = (0..ty.bytes()).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()).collect();
    data.and_then(|d| Tensor::from_bytes(ty.clone(), &d)).ok_or_else(want)
}
