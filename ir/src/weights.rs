//! References to weights: where the elements of a parameter lie, without opening the file.
//!
//! A parameter is a box (`region`) of an initializer: fused projections are split into one parameter per part at import,
//! so that each can be sharded on its own; checkpoints and results are reported under the initializer's name.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use crate::tensor::{Tensor, Type};

/// Where the elements of one parameter are.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightRef {
    /// The initializer's name in the model file.
    pub initializer: String,
    /// Element type and sizes of the whole initializer.
    pub ty: Type,
    /// The box of the initializer that this parameter is, per dim.
    pub region: Vec<Range<usize>>,
    /// Where the whole initializer's elements are stored.
    pub storage: WeightStorage,
}

/// Where an initializer's elements are stored.
#[derive(Debug, Clone, PartialEq)]
pub enum WeightStorage {
    /// Little-endian row-major bytes of a file. The file may be absent until a run needs it.
    File {
        /// The model file itself, or the external data file beside it.
        path: PathBuf,
        /// Byte offset.
        offset: u64,
        /// Byte length.
        length: u64,
    },
    /// Small initializers that the model file stores in typed fields.
    Inline(std::sync::Arc<crate::tensor::Tensor>),
}

/// Why elements of a parameter could not be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The file with the elements does not exist.
    #[error(
        "weights of `{initializer}` are in {}, which does not exist: put the file there, or use --random-weights", path.display()
    )]
    Absent {
        /// The initializer.
        initializer: String,
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be opened or read.
    #[error("weights of `{initializer}` cannot be read from {}: {source}", path.display())]
    Io {
        /// The initializer.
        initializer: String,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file ends before the elements do.
    #[error(
        "weights of `{initializer}` are bytes {offset} to {} of {}, which has only {found} bytes: the file is cut off, or belongs to \
         another model", offset.saturating_add(*length), path.display()
    )]
    TooShort {
        /// The initializer.
        initializer: String,
        /// The file.
        path: PathBuf,
        /// First byte wanted.
        offset: u64,
        /// Number of bytes wanted.
        length: u64,
        /// Size of the file.
        found: u64,
    },
    /// The stored length is not that of the type.
    #[error(
        "weights of `{initializer}` take {expected} bytes as {ty}, but {length} are stored: the model file is inconsistent"
    )]
    Length {
        /// The initializer.
        initializer: String,
        /// Its type.
        ty: Type,
        /// Bytes of that type.
        expected: u64,
        /// Bytes stored.
        length: u64,
    },
    /// The box asked for is not within the parameter.
    #[error("box {region:?} is not within `{initializer}` of sizes {dims:?}")]
    Region {
        /// The initializer.
        initializer: String,
        /// What was asked for.
        region: Vec<Range<usize>>,
        /// Sizes of the parameter.
        dims: Vec<usize>,
    },
}

impl WeightRef {
    /// A reference to a whole initializer.
    pub fn whole(initializer: impl Into<String>, ty: Type, storage: WeightStorage) -> WeightRef {
        let region = ty.dims.iter().map(|&d| 0..d).collect();
        WeightRef { initializer: initializer.into(), ty, region, storage }
    }

    /// Sizes of this parameter.
    pub fn dims(&self) -> Vec<usize> {
        self.region.iter().map(ExactSizeIterator::len).collect()
    }

    /// The part of this parameter that lies in a box, given per dim relative to the parameter.
    pub fn part(&self, within: &[Range<usize>]) -> WeightRef {
        let shifted = self.region.iter().zip(within).map(|(r, w)| r.start + w.start..r.start + w.end);
        WeightRef { region: shifted.collect(), ..self.clone() }
    }

    /// The name of this parameter: the initializer's, followed by the box when it is a part: `qkv.weight[:,0:64]`.
    pub fn name(&self) -> String {
        let whole = |r: &Range<usize>, d: usize| r.start == 0 && r.end == d;
        if self.region.iter().zip(&self.ty.dims).all(|(r, &d)| whole(r, d)) {
            return self.initializer.clone();
        }
        let dims = self.region.iter().zip(&self.ty.dims);
        let parts: Vec<String> =
            dims.map(|(r, &d)| if whole(r, d) { ":".to_string() } else { format!("{}:{}", r.start, r.end) }).collect();
        format!("{}[{}]", self.initializer, parts.join(","))
    }

    /// The elements of this parameter in a box, given per dim relative to the parameter. Only the pages that hold them are
    /// read.
    ///
    /// # Errors
    /// An absent, unreadable or too short file; a box outside the parameter.
    pub fn read(&self, within: &[Range<usize>]) -> Result<Tensor, WeightError> {
        let dims = self.dims();
        let fits = within.len() == dims.len() && within.iter().zip(&dims).all(|(r, &d)| r.start <= r.end && r.end <= d);
        if !fits {
            let (initializer, region) = (self.initializer.clone(), within.to_vec());
            return Err(WeightError::Region { initializer, region, dims });
        }
        let region = self.part(within).region;
        match &self.storage {
            WeightStorage::Inline(t) => self.copy(&region, t.bytes()),
            WeightStorage::File { path, offset, length } => {
                let named = |source: io::Error| {
                    let (initializer, path) = (self.initializer.clone(), path.clone());
                    match source.kind() {
                        io::ErrorKind::NotFound => WeightError::Absent { initializer, path },
                        _ => WeightError::Io { initializer, path, source },
                    }
                };
                let file = File::open(path).map_err(named)?;
                let found = file.metadata().map_err(named)?.len();
                if offset.checked_add(*length).is_none_or(|end| end > found) {
                    return Err(WeightError::TooShort {
                        initializer: self.initializer.clone(),
                        path: path.clone(),
                        offset: *offset,
                        length: *length,
                        found,
                    });
                }
                if *length == 0 {
                    return self.copy(&region, &[]);
                }
                // SAFETY: the map is read only, within the file's size, and dropped before this function returns. A file
                // that another process cuts meanwhile ends this process; no bytes outside it are reached.
                let map = unsafe {
                    memmap2::MmapOptions::new().offset(*offset).len(*length as usize).map(&file).map_err(named)?
                };
                self.copy(&region, &map)
            }
        }
    }

    /// Copies a box of the initializer out of its bytes.
    fn copy(&self, region: &[Range<usize>], bytes: &[u8]) -> Result<Tensor, WeightError> {
        if bytes.len() != self.ty.bytes() {
            return Err(WeightError::Length {
                initializer: self.initializer.clone(),
                ty: self.ty.clone(),
                expected: self.ty.bytes() as u64,
                length: bytes.len() as u64,
            });
        }
        let dims: Vec<usize> = region.iter().map(ExactSizeIterator::len).collect();
        let mut out = Tensor::zeros(Type::new(self.ty.dtype, dims.clone()));
        if out.bytes().is_empty() {
            return Ok(out);
        }
        // The dims from `inner` on are whole, so that a run of elements is contiguous from dim `inner - 1` on.
        let rank = dims.len();
        let whole = |d: usize| dims[d] == self.ty.dims[d];
        let inner = (0..rank).rev().find(|&d| !whole(d)).map_or(0, |d| d + 1);
        let outer = inner.saturating_sub(1);
        let mut strides = vec![self.ty.dtype.size(); rank];
        for d in (1..rank).rev() {
            strides[d - 1] = strides[d] * self.ty.dims[d];
        }
        let run: usize = dims[outer..].iter().product::<usize>() * self.ty.dtype.size();
        let mut index = vec![0; outer];
        let first: usize = region.iter().zip(&strides).map(|(r, s)| r.start * s).sum();
        for target in out.bytes_mut().chunks_exact_mut(run) {
            let at = first + index.iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>();
            target.copy_from_slice(&bytes[at..at + run]);
            for d in (0..outer).rev() {
                index[d] += 1;
                if index[d] < dims[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iota(dims: &[usize]) -> Tensor {
        let n = dims.iter().product::<usize>() as i64;
        Tensor::i64(dims, &(0..n).collect::<Vec<_>>())
    }

    #[test]
    fn a_box_of_a_part_is_read_from_a_file_and_inline_alike() {
        let t = iota(&[3, 4, 5]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.bin");
        let mut bytes = vec![7u8; 13];
        bytes.extend_from_slice(t.bytes());
        std::fs::write(&path, bytes).unwrap();
        let file = WeightStorage::File { path, offset: 13, length: 480 };
        for storage in [file, WeightStorage::Inline(std::sync::Arc::new(t.clone()))] {
            let w = WeightRef::whole("w", t.ty().clone(), storage);
            assert_eq!(w.name(), "w");
            assert_eq!(w.read(&[0..3, 0..4, 0..5]).unwrap(), t);
            let part = w.part(&[0..3, 1..4, 0..5]);
            assert_eq!(part.name(), "w[:,1:4,:]");
            assert_eq!(part.dims(), [3, 3, 5]);
            let x = part.read(&[1..3, 1..2, 2..4]).unwrap();
            assert_eq!(x, Tensor::i64([2, 1, 2], &[32, 33, 52, 53]));
            let x = part.read(&[1..2, 0..2, 0..5]).unwrap();
            assert_eq!(x, Tensor::i64([1, 2, 5], &(25..35).collect::<Vec<_>>()));
            assert_eq!(part.read(&[1..1, 0..2, 0..5]).unwrap().dims(), [0, 2, 5]);
            assert!(matches!(part.read(&[0..3, 0..4, 0..5]), Err(WeightError::Region { .. })));
        }
        let scalar = WeightRef::whole("s", Type::new(crate::DType::I64, []), WeightStorage::Inline(iota(&[]).into()));
        assert_eq!(scalar.read(&[]).unwrap(), iota(&[]));
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.bin");
        let file = |path: &std::path::Path, offset, length| {
            let ty = Type::new(crate::DType::F32, [4]);
            let w = WeightRef::whole("w", ty, WeightStorage::File { path: path.into(), offset, length });
            w.read(std::slice::from_ref(&(0..4)))
                .unwrap_err()
                .to_string()
                .replace(&dir.path().display().to_string(), "DIR")
        };
        let absent = file(&path, 0, 16);
        std::fs::write(&path, [0u8; 20]).unwrap();
        insta::assert_snapshot!(
            [absent, file(&path, 8, 16), file(&path, u64::MAX, 16), file(&path, 0, 8), file(dir.path(), 0, 16),]
                .join("\n")
        );
    }
}
