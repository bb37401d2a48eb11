//! Decides how a model is split over a cluster, and proves how good the decision is.
//!
//! Read in this order: [`mesh`], [`spec`], [`strategies`], [`reshard`], [`assignment`], [`solver`].

pub mod assignment;
pub mod mesh;
pub mod reshard;
pub mod solver;
pub mod spec;
pub mod strategies;
