//! Decides how a model is split over a cluster, and proves how good the decision is.
//!
//! Read in this order: [`mesh`], [`spec`], [`strategies`], [`reshard`], [`assignment`]: what a plan is made of; [`request`],
//! [`constraints`], [`roles`], [`routes`], [`execution`], [`space`], [`stages`], [`kernels`], [`times`], [`formulate`], [`solver`], [`simulate`], [`streams`], [`timeline`], [`pipeline`], [`search`]:
//! how it is found; [`plan`]: the file.

pub mod assignment;
pub mod constraints;
pub mod execution;
pub mod formulate;
pub mod kernels;
pub mod mesh;
pub mod pipeline;
pub mod plan;
pub mod request;
pub mod reshard;
pub mod roles;
pub mod routes;
pub mod search;
pub mod simulate;
pub mod solver;
pub mod space;
pub mod spec;
pub mod stages;
pub mod strategies;
pub mod streams;
pub mod timeline;
pub mod times;
pub(crate) mod views;
pub(crate) mod weights;
