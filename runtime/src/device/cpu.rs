//! The CPU: an arena in host memory, kernels of the operator table.
//!
//! Soundness. The arena is allocated once and only ever reached through its raw pointer: no reference to it outlives one
//! operation. Other ranks read and write it only inside collectives, between [`Device::memory`] and the return of the
//! communicator's call, when this rank is inside that call too and so runs no operation. Within an operation, slices
//! made from spans are disjoint where one of them is mutable: `compute` copies operands that overlap a result into the
//! staging buffer, and results that overlap each other are refused.

use std::alloc;
use std::ptr::NonNull;

use autoshard_ir::tensor::{ALIGN, View, ViewMut};
use autoshard_ir::{DType, Op, Type};

use super::{Device, DeviceError, DeviceKind, Layout, Mem, Shard, Span};
use crate::boxes::{self, BoxCopy};

/// The entry of the table.
pub const KIND: DeviceKind =
    DeviceKind { open: |_, layout| Ok(Box::new(Cpu::new(layout)?)), available: crate::memory::available };

/// A block of zeroed bytes, aligned to [`ALIGN`].
struct Block {
    base: NonNull<u8>,
    layout: alloc::Layout,
    bytes: usize,
}

// SAFETY: a block is owned memory; who may access it when is said in the module's header.
unsafe impl Send for Block {}

impl Block {
    fn new(bytes: u64) -> Result<Block, DeviceError> {
        let error = || DeviceError::OutOfMemory { bytes };
        let size = usize::try_from(bytes).map_err(|_| error())?;
        let layout = alloc::Layout::from_size_align(size.max(1), ALIGN).map_err(|_| error())?;
        // SAFETY: the layout has a size of at least 1.
        let base = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(error)?;
        Ok(Block { base, layout, bytes: size })
    }
    fn check(&self, span: Span) -> Result<(), DeviceError> {
        match span.offset.checked_add(span.bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(DeviceError::Span(format!(
                "bytes {}..+{} lie outside the arena of {} bytes",
                span.offset, span.bytes, self.bytes
            ))),
        }
    }
    /// # Safety
    /// `check`ed; no mutable slice that overlaps lives.
    unsafe fn slice(&self, span: Span) -> &[u8] {
        // SAFETY: inside the allocation, which is initialised; aliasing as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(span.offset), span.bytes) }
    }
    /// # Safety
    /// `check`ed; no other slice that overlaps lives.
    #[allow(clippy::mut_from_ref)] // The block is reached by its raw pointer only, see the module's header.
    unsafe fn slice_mut(&self, span: Span) -> &mut [u8] {
        // SAFETY: inside the allocation, which is initialised; aliasing as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(span.offset), span.bytes) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// The device of one rank.
pub struct Cpu {
    arena: Block,
    staging: Block,
    poison: bool,
}

impl Cpu {
    /// A device with its arena, zeroed.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(layout: Layout) -> Result<Cpu, DeviceError> {
        let poison = layout.poison;
        Ok(Cpu { arena: Block::new(layout.arena)?, staging: Block::new(layout.staging)?, poison })
    }

    fn disjoint(&self, from: Span, to: Span) -> Result<(), DeviceError> {
        self.arena.check(from)?;
        self.arena.check(to)?;
        if from.overlaps(&to) {
            return Err(DeviceError::Span(format!("operand {from:?} and result {to:?} overlap")));
        }
        Ok(())
    }
}

fn same_length(a: usize, b: usize) -> Result<(), DeviceError> {
    if a != b {
        return Err(DeviceError::Span(format!("{a} bytes are copied to {b}")));
    }
    Ok(())
}

impl Device for Cpu {
    fn upload(&mut self, bytes: &[u8], to: Span) -> Result<(), DeviceError> {
        self.arena.check(to)?;
        same_length(bytes.len(), to.bytes)?;
        // SAFETY: checked; the only slice, for `&mut self`.
        unsafe { self.arena.slice_mut(to) }.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.arena.check(from)?;
        same_length(from.bytes, bytes.len())?;
        // SAFETY: checked; the only slice, for `&mut self`.
        bytes.copy_from_slice(unsafe { self.arena.slice(from) });
        Ok(())
    }

    fn copy(&mut self, from: Span, to: Span) -> Result<(), DeviceError> {
        same_length(from.bytes, to.bytes)?;
        if from == to {
            return self.arena.check(from);
        }
        self.disjoint(from, to)?;
        // SAFETY: checked and disjoint.
        unsafe { self.arena.slice_mut(to).copy_from_slice(self.arena.slice(from)) };
        Ok(())
    }

    fn slice(
        &mut self,
        from: Span,
        from_dims: &[usize],
        origin: &[usize],
        to: Span,
        to_ty: &Type,
    ) -> Result<(), DeviceError> {
        self.disjoint(from, to)?;
        let fits = from_dims.len() == to_ty.rank()
            && from.bytes == from_dims.iter().product::<usize>() * to_ty.dtype.size()
            && to.bytes == to_ty.bytes()
            && (0..from_dims.len()).all(|d| origin[d] + to_ty.dims[d] <= from_dims[d]);
        if !fits {
            return Err(DeviceError::Span(format!("no box {to_ty} at {origin:?} of a tensor of sizes {from_dims:?}")));
        }
        let element = to_ty.dtype.size();
        let zero = vec![0; from_dims.len()];
        let dims = &to_ty.dims;
        let c = BoxCopy { dims, from_dims, from_origin: origin, to_dims: dims, to_origin: &zero, element };
        // SAFETY: checked and disjoint.
        unsafe { boxes::copy(&c, self.arena.slice(from), self.arena.slice_mut(to)) };
        Ok(())
    }

    fn zero(&mut self, span: Span) -> Result<(), DeviceError> {
        self.arena.check(span)?;
        // SAFETY: checked; the only slice, for `&mut self`.
        unsafe { self.arena.slice_mut(span) }.fill(0);
        Ok(())
    }

    fn accumulate(&mut self, ty: &Type, from: Span, to: Span) -> Result<(), DeviceError> {
        self.disjoint(from, to)?;
        same_length(from.bytes, to.bytes)?;
        same_length(from.bytes, ty.bytes())?;
        // SAFETY: checked and disjoint.
        let (x, sum) = unsafe { (self.arena.slice(from), self.arena.slice_mut(to)) };
        fn each<T: bytemuck::Pod>(x: &[u8], sum: &mut [u8], f: impl Fn(T, T) -> T) -> Result<(), DeviceError> {
            let fit = |_| DeviceError::Span("operands of a sum are not aligned".into());
            let x: &[T] = bytemuck::try_cast_slice(x).map_err(fit)?;
            let sum: &mut [T] = bytemuck::try_cast_slice_mut(sum).map_err(fit)?;
            for (s, x) in sum.iter_mut().zip(x) {
                *s = f(*s, *x);
            }
            Ok(())
        }
        use half::{bf16, f16};
        match ty.dtype {
            DType::F64 => each(x, sum, |a: f64, b| a + b),
            DType::F32 => each(x, sum, |a: f32, b| a + b),
            DType::F16 => each(x, sum, |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32())),
            DType::Bf16 => each(x, sum, |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32())),
            DType::I64 => each(x, sum, i64::wrapping_add),
            DType::I32 => each(x, sum, i32::wrapping_add),
            DType::I8 => each(x, sum, i8::wrapping_add),
            DType::U8 => each(x, sum, u8::wrapping_add),
            DType::Bool => each(x, sum, |a: u8, b: u8| a | b),
        }
    }

    fn compute(&mut self, op: &Op, inputs: &[Shard<'_>], outputs: &[Shard<'_>]) -> Result<(), DeviceError> {
        for s in inputs.iter().chain(outputs) {
            self.arena.check(s.span)?;
            same_length(s.span.bytes, s.ty.bytes())?;
        }
        for (i, a) in outputs.iter().enumerate() {
            if outputs[..i].iter().any(|b| a.span.overlaps(&b.span)) {
                return Err(DeviceError::Span(format!("results of {op} overlap at {:?}", a.span)));
            }
        }
        let staged: Vec<Option<Span>> = stage(inputs.iter().map(|s| s.span), outputs.iter().map(|s| s.span));
        for (s, place) in inputs.iter().zip(&staged) {
            if let Some(place) = *place {
                self.staging.check(place)?;
                // SAFETY: checked; two different allocations, and no other slice lives.
                unsafe { self.staging.slice_mut(place).copy_from_slice(self.arena.slice(s.span)) };
            }
        }
        let views: Vec<View<'_>> = inputs
            .iter()
            .zip(&staged)
            .map(|(s, place)| View {
                ty: s.ty.clone(),
                origin: s.origin.to_vec(),
                global: s.global.to_vec(),
                // SAFETY: checked. Operands in the arena are disjoint from all results, those in staging are read only.
                data: unsafe {
                    match *place {
                        Some(place) => self.staging.slice(place),
                        None => self.arena.slice(s.span),
                    }
                },
            })
            .collect();
        let mut results: Vec<ViewMut<'_>> = outputs
            .iter()
            .map(|s| ViewMut {
                ty: s.ty.clone(),
                origin: s.origin.to_vec(),
                global: s.global.to_vec(),
                // SAFETY: checked; disjoint from each other and from operands.
                data: unsafe { self.arena.slice_mut(s.span) },
            })
            .collect();
        if self.poison {
            for r in &mut results {
                r.data.fill(0xff);
            }
        }
        Ok(op.run(&views, &mut results)?)
    }

    unsafe fn memory(&mut self, span: Span) -> Result<Mem, DeviceError> {
        self.arena.check(span)?;
        // SAFETY: inside the arena; the rest is the caller's promise.
        Ok(unsafe { Mem::new(self.arena.base.as_ptr().add(span.offset), span.bytes) })
    }
}

/// Where operands that overlap a result are copied to in the staging buffer.
fn stage(inputs: impl Iterator<Item = Span>, outputs: impl Iterator<Item = Span>) -> Vec<Option<Span>> {
    let outputs: Vec<Span> = outputs.collect();
    let mut end = 0;
    inputs
        .map(|s| {
            outputs.iter().any(|o| o.overlaps(&s)).then(|| {
                let offset = end;
                end += s.bytes.next_multiple_of(ALIGN);
                Span { offset, bytes: s.bytes }
            })
        })
        .collect()
}

/// Bytes of staging that an operator on these operands and results needs.
pub fn staging_bytes(inputs: impl Iterator<Item = Span>, outputs: impl Iterator<Item = Span>) -> u64 {
    let last = stage(inputs, outputs).into_iter().flatten().map(|s| s.offset + s.bytes).max();
    last.unwrap_or(0) as u64
}
