//! One file per command.

pub mod check;
pub mod clusters;
pub mod diff;
pub mod explain;
pub mod inspect;
pub mod plan;
pub mod profile;
pub mod report;
pub mod run;
pub mod verify;
