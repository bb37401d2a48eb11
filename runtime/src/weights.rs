//! First contents of states: read from the model's files, drawn at random, or zeros; always just the box that a rank keeps.

use std::ops::Range;

use autoshard_ir::convert;
use autoshard_ir::weights::WeightRef;
use autoshard_ir::{Tensor, Type};

use crate::random;

/// Where parameters come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// The model's files.
    Files,
    /// Drawn with this seed, see [`crate::random`].
    Random(u64),
}

/// The parameter `name` could not be had.
#[derive(Debug, thiserror::Error)]
#[error("parameter `{name}`: {reason}")]
pub struct WeightsError {
    /// Its name.
    pub name: String,
    /// Why, with the file.
    pub reason: String,
}

impl Weights {
    /// The box `region` of the first content of a state of unsharded type `ty`; zeros without `init`. The unsharded
    /// reference calls it with the whole as the box.
    ///
    /// # Errors
    /// Files that are absent, short or unreadable; sizes that differ from the model's.
    pub fn read(
        self,
        name: &str,
        init: Option<&WeightRef>,
        ty: &Type,
        region: &[Range<usize>],
    ) -> Result<Tensor, WeightsError> {
        let error = |reason: String| WeightsError { name: name.into(), reason };
        let dims: Vec<usize> = region.iter().map(|r| r.end - r.start).collect();
        let Some(w) = init else { return Ok(Tensor::zeros(Type::new(ty.dtype, dims))) };
        let sizes: Vec<usize> = w.region.iter().map(|r| r.end - r.start).collect();
        if sizes != ty.dims {
            return Err(error(format!("{:?} of initializer `{}` has not the sizes of {ty}", w.region, w.initializer)));
        }
        match self {
            Weights::Random(seed) => {
                let inside: Vec<Range<usize>> =
                    w.region.iter().zip(region).map(|(w, r)| w.start + r.start..w.start + r.end).collect();
                Ok(random::elements(seed, &w.initializer, &w.ty, &inside, ty.dtype))
            }
            Weights::Files => {
                let t = w.read(region).map_err(|e| error(e.to_string()))?;
                Ok(if t.dtype() == ty.dtype { t } else { convert::cast(&t, ty.dtype) })
            }
        }
    }

    /// [`read`](Self::read) of the whole.
    ///
    /// # Errors
    /// As `read`.
    pub fn whole(self, name: &str, init: Option<&WeightRef>, ty: &Type) -> Result<Tensor, WeightsError> {
        let region: Vec<Range<usize>> = ty.dims.iter().map(|d| 0..*d).collect();
        self.read(name, init, ty, &region)
    }
}
