//! Named tensors in files: `.npz` and `.safetensors`, by extension. Inputs and outputs of runs.
//!
//! NumPy has no bfloat16: such tensors are written to `.npz` as f32. The header of an `.npy` file is one line of text, read
//! and written here: the crate for it brings a parser generator and assembly.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek, Write};
use std::path::{Path, PathBuf};

use autoshard_ir::{DType, Tensor, Type, convert};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::files;

/// A file of tensors that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct FileError {
    /// Which file.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// Formats, by extension.
enum Format {
    Npz,
    Safetensors,
}

fn format(path: &Path) -> Result<Format, String> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("npz") => Ok(Format::Npz),
        Some("safetensors") => Ok(Format::Safetensors),
        _ => Err("the name of a file of tensors ends in .npz or .safetensors".into()),
    }
}

/// Reads all tensors of a file.
///
/// # Errors
/// A file that is absent, damaged, of another format, or with element types that are not known.
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, FileError> {
    let error = |reason: String| FileError { path: path.into(), reason };
    match format(path).map_err(error)? {
        Format::Npz => {
            let file = File::open(path).map_err(|e| error(e.to_string()))?;
            read_npz(std::io::BufReader::new(file)).map_err(error)
        }
        Format::Safetensors => {
            let bytes = std::fs::read(path).map_err(|e| error(e.to_string()))?;
            let parsed = SafeTensors::deserialize(&bytes).map_err(|e| error(e.to_string()))?;
            let mut out = BTreeMap::new();
            for (name, view) in parsed.tensors() {
                let dtype = from_safetensors_dtype(view.dtype())
                    .ok_or_else(|| error(format!("`{name}` has element type {:?}", view.dtype())))?;
                let t = Tensor::from_bytes(Type::new(dtype, view.shape()), view.data())
                    .ok_or_else(|| error(format!("`{name}` has a wrong length")))?;
                out.insert(name, t);
            }
            Ok(out)
        }
    }
}

/// Writes tensors to a file.
///
/// # Errors
/// A name without a known extension; what the system says.
pub fn write(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), FileError> {
    let error = |reason: String| FileError { path: path.into(), reason };
    let bytes = match format(path).map_err(error)? {
        Format::Npz => to_npz(tensors).map_err(error)?,
        Format::Safetensors => {
            let list: Vec<(String, Tensor)> = tensors.iter().map(|(n, t)| (n.clone(), t.clone())).collect();
            to_safetensors(&list).map_err(error)?
        }
    };
    files::write(path, &bytes).map_err(|e| error(e.to_string()))
}

/// Whether the name says what format a file has.
///
/// # Errors
/// A name without a known extension.
pub fn check_name(path: &Path) -> Result<(), FileError> {
    format(path).map(|_| ()).map_err(|reason| FileError { path: path.into(), reason })
}

fn read_npz(file: impl Read + Seek) -> Result<BTreeMap<String, Tensor>, String> {
    let mut archive = zip::ZipArchive::new(file).map_err(|e| format!("is not an .npz file: {e}"))?;
    let mut out = BTreeMap::new();
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| e.to_string())?;
        let name = entry.name().strip_suffix(".npy").unwrap_or(entry.name()).to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(|e| format!("`{name}`: {e}"))?;
        let t = read_npy(&bytes).map_err(|e| format!("`{name}`: {e}"))?;
        out.insert(name, t);
    }
    Ok(out)
}

/// NumPy's names of element types, little-endian (or of one byte).
const NPY: [(DType, &str); 8] = [
    (DType::F64, "<f8"),
    (DType::F32, "<f4"),
    (DType::F16, "<f2"),
    (DType::I64, "<i8"),
    (DType::I32, "<i4"),
    (DType::I8, "|i1"),
    (DType::U8, "|u1"),
    (DType::Bool, "|b1"),
];

const MAGIC: &[u8] = b"\x93NUMPY";

/// The header of a `.npy` file (NumPy's NEP 1): element type, whether the first dim is contiguous, sizes, and where the
/// data begins.
fn npy_header(bytes: &[u8]) -> Result<(DType, bool, Vec<usize>, usize), String> {
    let version = bytes.strip_prefix(MAGIC).and_then(|b| b.first()).ok_or("is not an .npy file")?;
    let (length, start) = match (version, bytes.get(8..12)) {
        (1, Some(b)) => (u16::from_le_bytes([b[0], b[1]]) as usize, 10),
        (2 | 3, Some(b)) => (u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize, 12),
        _ => return Err("has an unknown version of the .npy format".into()),
    };
    let end = start + length;
    let text = bytes.get(start..end).and_then(|t| std::str::from_utf8(t).ok()).ok_or("is cut off in its header")?;
    // A Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
    let value = |key: &str| {
        let at = text.find(&format!("'{key}':"))?;
        Some(text[at + key.len() + 3..].trim_start())
    };
    let odd = || format!("has an odd header: {}", text.trim());
    let descr = value("descr").ok_or_else(odd)?;
    let name = descr.strip_prefix('\'').and_then(|d| d.split('\'').next());
    let known = name.and_then(|name| NPY.iter().find(|(_, n)| *n == name));
    let unknown = || format!("has elements of NumPy type {}, which is not known", name.unwrap_or(descr));
    let dtype = known.ok_or_else(unknown)?.0;
    let order = value("fortran_order").ok_or_else(odd)?;
    let fortran = order.starts_with("True");
    if !fortran && !order.starts_with("False") {
        return Err(odd());
    }
    let shape = value("shape").and_then(|s| s.strip_prefix('(')?.split(')').next()).ok_or_else(odd)?;
    let sizes = shape.split(',').map(str::trim).filter(|s| !s.is_empty());
    let dims: Vec<usize> = sizes.map(|s| s.parse().map_err(|_| odd())).collect::<Result<_, _>>()?;
    Ok((dtype, fortran, dims, end))
}

fn read_npy(bytes: &[u8]) -> Result<Tensor, String> {
    let (dtype, fortran, dims, start) = npy_header(bytes)?;
    let data = &bytes[start..];
    let count = dims.iter().try_fold(dtype.size(), |n, d| n.checked_mul(*d)).ok_or("has sizes that overflow")?;
    if data.len() != count {
        return Err(format!("has {} bytes of data, its header says {count}", data.len()));
    }
    let mut out = Tensor::zeros(Type::new(dtype, dims.clone()));
    if !fortran {
        out.bytes_mut().copy_from_slice(data);
        return Ok(out);
    }
    let (n, size) = (out.ty().numel(), dtype.size());
    for i in 0..n {
        let (mut rest, mut at, mut stride) = (i, 0, n);
        for d in dims.iter().rev() {
            stride /= d;
            at += rest % d * stride;
            rest /= d;
        }
        out.bytes_mut()[i * size..][..size].copy_from_slice(&data[at * size..][..size]);
    }
    Ok(out)
}

fn to_npy(t: &Tensor) -> Vec<u8> {
    let widened = (t.dtype() == DType::Bf16).then(|| convert::cast(t, DType::F32));
    let t = widened.as_ref().unwrap_or(t);
    // Every element type but bfloat16 is in the table.
    let name = NPY.iter().find(|(d, _)| *d == t.dtype()).map_or("<f4", |(_, n)| n);
    let sizes: String = t.dims().iter().map(|d| format!("{d}, ")).collect();
    let mut header = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({sizes}), }}");
    let unpadded = MAGIC.len() + 4 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', unpadded.next_multiple_of(64) - unpadded));
    header.push('\n');
    let length = (header.len() as u16).to_le_bytes();
    [MAGIC, &[1, 0], &length, header.as_bytes(), t.bytes()].concat()
}

fn to_npz(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, String> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Stored)
        .large_file(tensors.values().any(|t| t.bytes().len() > u32::MAX as usize / 2));
    for (name, t) in tensors {
        zip.start_file(format!("{name}.npy"), options).map_err(|e| format!("`{name}`: {e}"))?;
        zip.write_all(&to_npy(t)).map_err(|e| format!("`{name}`: {e}"))?;
    }
    Ok(zip.finish().map_err(|e| e.to_string())?.into_inner())
}

const DTYPES: [(DType, Dtype); 9] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::Bf16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I8, Dtype::I8),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
];

/// Our element type for that of a safetensors file.
pub(crate) fn from_safetensors_dtype(d: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, s)| *s == d).map(|(d, _)| *d)
}

/// The bytes of a safetensors file.
pub(crate) fn to_safetensors(tensors: &[(String, Tensor)]) -> Result<Vec<u8>, String> {
    let mut views = Vec::new();
    for (name, t) in tensors {
        let found = DTYPES.iter().find(|(d, _)| *d == t.dtype()).map(|(_, s)| *s);
        let dtype = found.ok_or_else(|| format!("`{name}`: element type {}", t.dtype()))?;
        let view = TensorView::new(dtype, t.dims().to_vec(), t.bytes()).map_err(|e| format!("`{name}`: {e}"))?;
        views.push((name.as_str(), view));
    }
    safetensors::serialize(views, None).map_err(|e| e.to_string())
}
