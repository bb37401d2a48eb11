//! The operator table.
//!
//! To add an operator: one file here with its [`OpDef`], and one line in [`TABLE`].

use crate::op::OpDef;

/// Every operator.
pub static TABLE: &[&OpDef] = &[];

/// The operator of that name.
pub fn find(name: &str) -> Option<&'static OpDef> {
    TABLE.iter().copied().find(|d| d.name == name)
}
