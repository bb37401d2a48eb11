//! References to weights: where the elements of a parameter lie, without opening the file.
//!
//! A parameter is a box (`region`) of an initializer: fused projections are split into one parameter per part at import,
//! so that each can be sharded on its own; checkpoints and results are reported under the initializer's name.

use std::ops::Range;
use std::path::PathBuf;

use crate::tensor::Type;

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
