//! Tensors in host memory: owned ([`Tensor`]) and borrowed ([`View`], [`ViewMut`]).
//!
//! Everything is dense, row-major and aligned to [`ALIGN`] bytes. A view also says where it lies in the unsharded
//! tensor (`origin` within `global`): kernels whose result depends on an absolute index (embedding lookup, iota, causal
//! masks, dropout) read it there, so one kernel serves whole tensors and shards alike.
//!
//! Invariants: `data.len() == product(dims) * dtype.size()`; `origin[d] + dims[d] <= global[d]`.

use crate::dtype::DType;

/// Alignment in bytes of every tensor's data.
pub const ALIGN: usize = 64;

/// No tensor may have more elements: sizes beyond it are a slip or an attack, and products of sizes stay far from
/// overflow.
pub const MAX_ELEMENTS: usize = 1 << 48;

/// The number of elements of a shape; `usize::MAX` where it is beyond that.
pub fn numel(dims: &[usize]) -> usize {
    dims.iter().fold(1, |n: usize, &d| n.saturating_mul(d))
}

/// An element type and sizes: the type of a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub dims: Vec<usize>,
}

impl Type {
    /// A type of these parts.
    pub fn new(dtype: DType, dims: impl Into<Vec<usize>>) -> Type {
        Type { dtype, dims: dims.into() }
    }
    /// The number of dims.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }
    /// The number of elements.
    pub fn numel(&self) -> usize {
        numel(&self.dims)
    }
    /// Whether it has at most [`MAX_ELEMENTS`] elements, sizes of 0 taken as 1.
    pub fn is_sane(&self) -> bool {
        self.dims.iter().fold(1usize, |n, &d| n.saturating_mul(d.max(1))) <= MAX_ELEMENTS
    }
    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.numel().saturating_mul(self.dtype.size())
    }
}

impl std::fmt::Display for Type {
    /// `f32[2,12,64]`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.dims.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

/// Bytes aligned to [`ALIGN`], zeroed at creation.
#[derive(Clone)]
pub struct Bytes64 {
    lines: Vec<Line>,
    len: usize,
}

impl Bytes64 {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Bytes64 {
        Bytes64 { lines: vec![Line([0; ALIGN]); len.div_ceil(ALIGN)], len }
    }
}

impl std::ops::Deref for Bytes64 {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl std::ops::DerefMut for Bytes64 {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// An owned tensor.
#[derive(Clone)]
pub struct Tensor {
    ty: Type,
    data: Bytes64,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.ty)
    }
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Tensor) -> bool {
        self.ty == other.ty && self.data[..] == other.data[..]
    }
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(ty: Type) -> Tensor {
        let data = Bytes64::zeroed(ty.bytes());
        Tensor { ty, data }
    }
    /// A tensor of these bytes (little endian, row-major); `None` when the length does not fit the type.
    pub fn from_bytes(ty: Type, bytes: &[u8]) -> Option<Tensor> {
        let mut t = Tensor::zeros(ty);
        if t.data.len() != bytes.len() {
            return None;
        }
        t.data.copy_from_slice(bytes);
        Some(t)
    }
    /// A tensor of these elements. Panics when their number or type does not fit: for literals.
    pub fn from_slice<T: bytemuck::Pod>(dtype: DType, dims: impl Into<Vec<usize>>, elements: &[T]) -> Tensor {
        assert_eq!(dtype.size(), size_of::<T>(), "element type");
        Tensor::from_bytes(Type::new(dtype, dims), bytemuck::cast_slice(elements)).expect("number of elements")
    }
    /// An f32 tensor.
    pub fn f32(dims: impl Into<Vec<usize>>, elements: &[f32]) -> Tensor {
        Tensor::from_slice(DType::F32, dims, elements)
    }
    /// An i64 tensor.
    pub fn i64(dims: impl Into<Vec<usize>>, elements: &[i64]) -> Tensor {
        Tensor::from_slice(DType::I64, dims, elements)
    }
    /// Its type.
    pub fn ty(&self) -> &Type {
        &self.ty
    }
    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }
    /// Its sizes.
    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }
    /// Its bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }
    /// Its elements as `T`, whose size must be the element type's.
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.data)
    }
    /// Its elements as `T`, writable.
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.data)
    }
    /// A view of the whole tensor.
    pub fn view(&self) -> View<'_> {
        View { ty: self.ty.clone(), origin: vec![0; self.ty.rank()], global: self.ty.dims.clone(), data: &self.data }
    }
    /// A writable view of the whole tensor.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            ty: self.ty.clone(),
            origin: vec![0; self.ty.rank()],
            global: self.ty.dims.clone(),
            data: &mut self.data,
        }
    }
}

/// A tensor or a shard of one, borrowed.
#[derive(Clone)]
pub struct View<'a> {
    /// Local type.
    pub ty: Type,
    /// Index in the unsharded tensor of the first element.
    pub origin: Vec<usize>,
    /// Sizes of the unsharded tensor.
    pub global: Vec<usize>,
    /// Elements, row-major.
    pub data: &'a [u8],
}

/// A tensor or a shard of one, borrowed for writing.
pub struct ViewMut<'a> {
    /// Local type.
    pub ty: Type,
    /// Index in the unsharded tensor of the first element.
    pub origin: Vec<usize>,
    /// Sizes of the unsharded tensor.
    pub global: Vec<usize>,
    /// Elements, row-major.
    pub data: &'a mut [u8],
}

impl<'a> View<'a> {
    /// Its local sizes.
    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }
    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }
    /// Its elements as `T`, whose size must be the element type's.
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &'a [T] {
        bytemuck::cast_slice(self.data)
    }
}

impl ViewMut<'_> {
    /// Its local sizes.
    pub fn dims(&self) -> &[usize] {
        &self.ty.dims
    }
    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }
    /// Its elements as `T`, whose size must be the element type's.
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.data)
    }
}
