//! Decides how a model is split over a cluster, and proves how good the decision is.
//!
//! Read in this order: [`mesh`], [`spec`], [`assignment`].

pub mod assignment;
pub mod mesh;
pub mod solver;
pub mod spec;
