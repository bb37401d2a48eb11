//! Tensors of an ONNX file: their types, where their elements are, their elements.

use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use super::proto::onnx::TensorProto;
use super::proto::onnx::tensor_proto::DataLocation;
use crate::dtype::DType;
use crate::tensor::{Tensor, Type};
use crate::weights::{WeightRef, WeightStorage};

/// The element type of an ONNX number.
///
/// # Errors
/// Types that tensors here cannot have, by name.
pub fn dtype(code: i32) -> Result<DType, String> {
    const NAMES: [&str; 29] = [
        "undefined",
        "float",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "int32",
        "int64",
        "string",
        "bool",
        "float16",
        "double",
        "uint32",
        "uint64",
        "complex64",
        "complex128",
        "bfloat16",
        "float8e4m3fn",
        "float8e4m3fnuz",
        "float8e5m2",
        "float8e5m2fnuz",
        "uint4",
        "int4",
        "float4e2m1",
        "float8e8m0",
        "uint2",
        "int2",
        "float6e2m3",
        "float6e3m2",
    ];
    Ok(match code {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::Bf16,
        _ => {
            let name = usize::try_from(code).ok().and_then(|i| NAMES.get(i)).copied().unwrap_or("unknown");
            return Err(format!("element type {code} ({name}) is not supported"));
        }
    })
}

/// A type of sizes that a file gives: none negative, and not more elements than [`MAX_ELEMENTS`](crate::tensor::MAX_ELEMENTS).
///
/// # Errors
/// What is wrong with them.
pub fn typed_dims(dtype: DType, dims: &[i64]) -> Result<Type, String> {
    let size = |&d: &i64| usize::try_from(d).map_err(|_| format!("sizes {dims:?}: {d} is negative"));
    let ty = Type::new(dtype, dims.iter().map(size).collect::<Result<Vec<_>, _>>()?);
    if ty.is_sane() { Ok(ty) } else { Err(format!("sizes {dims:?}: more than 2^48 elements")) }
}

/// The file that tensors are stored in.
pub struct Source<'a> {
    /// The model file.
    pub path: &'a Path,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Where the elements of a tensor are. Nothing is read except tensors stored in typed fields.
///
/// # Errors
/// Types that are not supported, sizes and lengths that do not fit, external files outside the model's folder.
pub fn reference(t: &TensorProto, source: &Source<'_>) -> Result<WeightRef, String> {
    let ty = typed_dims(dtype(t.data_type())?, &t.dims)?;
    if t.segment.is_some() {
        return Err("is stored in segments, which is not supported".to_string());
    }
    let expected = ty.bytes() as u64;
    if t.data_location.is_some_and(|l| l.enum_value_or_default() == DataLocation::EXTERNAL) {
        let storage = external(t, source.path, expected)?;
        return Ok(WeightRef::whole(t.name(), ty, storage));
    }
    let storage = match &t.raw_data {
        Some(raw) => {
            if raw.len() as u64 != expected {
                return Err(format!("{ty} takes {expected} bytes, but {} are stored", raw.len()));
            }
            match within(source.bytes, raw) {
                Some(at) => {
                    WeightStorage::File { path: source.path.to_path_buf(), offset: at.start as u64, length: expected }
                }
                None => {
                    let found = Tensor::from_bytes(ty.clone(), raw).ok_or("its length does not fit its type")?;
                    WeightStorage::Inline(Arc::new(found))
                }
            }
        }
        None => WeightStorage::Inline(Arc::new(typed(t, &ty)?)),
    };
    Ok(WeightRef::whole(t.name(), ty, storage))
}

/// Where a slice lies in another, when it does.
fn within(whole: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    let end = start.checked_add(part.len())?;
    (end <= whole.len()).then_some(start..end)
}

fn external(t: &TensorProto, model: &Path, expected: u64) -> Result<WeightStorage, String> {
    let entry = |key: &str| t.external_data.iter().find(|e| e.key() == key).map(|e| e.value());
    let number = |key: &str| {
        entry(key).map(|v| v.parse::<u64>().map_err(|_| format!("external {key} `{v}` is no number"))).transpose()
    };
    let location = entry("location").filter(|l| !l.is_empty()).ok_or("is external, but names no file")?;
    let inside = Path::new(location).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if !inside {
        return Err(format!("external file `{location}` is not within the model's folder"));
    }
    let offset = number("offset")?.unwrap_or(0);
    let length = number("length")?.unwrap_or(expected);
    if length != expected {
        return Err(format!("takes {expected} bytes, but external length is {length}"));
    }
    if offset.checked_add(length).is_none() {
        return Err(format!("external offset {offset} is out of range"));
    }
    let path = model.parent().unwrap_or(Path::new("")).join(location);
    Ok(WeightStorage::File { path, offset, length })
}

/// The elements of a tensor stored in typed fields.
fn typed(t: &TensorProto, ty: &Type) -> Result<Tensor, String> {
    let stored = match ty.dtype {
        DType::F32 => t.float_data.len(),
        DType::F64 => t.double_data.len(),
        DType::I64 => t.int64_data.len(),
        DType::F16 | DType::Bf16 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => t.int32_data.len(),
    };
    if stored != ty.numel() {
        return Err(format!("{ty} has {} elements, but {stored} are stored", ty.numel()));
    }
    let mut out = Tensor::zeros(ty.clone());
    match ty.dtype {
        DType::F32 => out.as_mut_slice::<f32>().copy_from_slice(&t.float_data),
        DType::F64 => out.as_mut_slice::<f64>().copy_from_slice(&t.double_data),
        DType::I64 => out.as_mut_slice::<i64>().copy_from_slice(&t.int64_data),
        DType::I32 => out.as_mut_slice::<i32>().copy_from_slice(&t.int32_data),
        DType::F16 | DType::Bf16 => {
            for (o, &x) in out.as_mut_slice::<u16>().iter_mut().zip(&t.int32_data) {
                *o = u16::try_from(x).map_err(|_| format!("{x} is no half float"))?;
            }
        }
        DType::I8 | DType::U8 => {
            for (o, &x) in out.bytes_mut().iter_mut().zip(&t.int32_data) {
                *o = x as u8;
            }
        }
        DType::Bool => {
            for (o, &x) in out.bytes_mut().iter_mut().zip(&t.int32_data) {
                *o = u8::from(x != 0);
            }
        }
    }
    Ok(out)
}

/// The elements of a tensor that is an attribute.
///
/// # Errors
/// As [`reference`]; external data that cannot be read.
pub fn attribute(t: &TensorProto, source: &Source<'_>) -> Result<Tensor, String> {
    let found = reference(t, source)?;
    match &found.storage {
        WeightStorage::Inline(t) => Ok(Tensor::clone(t)),
        WeightStorage::File { path, offset, length } if path == source.path => {
            let range = *offset as usize..(*offset + *length) as usize;
            let bytes = source.bytes.get(range).ok_or("its bytes are not within the file")?;
            bools(Tensor::from_bytes(found.ty.clone(), bytes).ok_or("its length does not fit its type")?)
        }
        WeightStorage::File { .. } => {
            let whole: Vec<Range<usize>> = found.region.clone();
            bools(found.read(&whole).map_err(|e| e.to_string())?)
        }
    }
}

/// Truth values are 0 or 1, whatever byte a file has.
pub fn bools(mut t: Tensor) -> Result<Tensor, String> {
    if t.dtype() == DType::Bool {
        t.bytes_mut().iter_mut().for_each(|b| *b = u8::from(*b != 0));
    }
    Ok(t)
}
