//! The operator table.
//!
//! To add an operator: one file here with its [`OpDef`], and one line in [`TABLE`].

use crate::op::OpDef;

pub mod binary;
pub mod cast;
pub mod compare;
pub mod expand;
pub mod reduce;
pub mod reshape;
pub(crate) mod support;
pub mod transpose;
pub mod unary;

/// Every operator, by file.
pub static TABLE: &[&OpDef] = &[
    &binary::ADD,
    &binary::SUB,
    &binary::MUL,
    &binary::DIV,
    &binary::MOD,
    &binary::POW,
    &binary::MAX,
    &binary::MIN,
    &cast::CAST,
    &compare::EQUAL,
    &compare::LESS,
    &compare::LESS_OR_EQUAL,
    &compare::GREATER,
    &compare::GREATER_OR_EQUAL,
    &compare::AND,
    &compare::OR,
    &compare::XOR,
    &compare::NOT,
    &compare::IS_NAN,
    &compare::WHERE,
    &expand::EXPAND,
    &reduce::REDUCE_SUM,
    &reduce::REDUCE_MAX,
    &reduce::REDUCE_MIN,
    &reduce::REDUCE_PROD,
    &reduce::ARG_MAX,
    &reshape::RESHAPE,
    &transpose::TRANSPOSE,
    &unary::NEG,
    &unary::ABS,
    &unary::SIGN,
    &unary::EXP,
    &unary::LOG,
    &unary::SQRT,
    &unary::RECIPROCAL,
    &unary::ERF,
    &unary::SIN,
    &unary::COS,
    &unary::FLOOR,
    &unary::CEIL,
    &unary::ROUND,
    &unary::TANH,
    &unary::TANH_GRAD,
    &unary::SIGMOID,
    &unary::SIGMOID_GRAD,
    &unary::RELU,
    &unary::RELU_GRAD,
    &unary::GELU,
    &unary::GELU_GRAD,
    &unary::SILU,
    &unary::SILU_GRAD,
    &unary::SOFTPLUS,
];

/// The operator of that name.
pub fn find(name: &str) -> Option<&'static OpDef> {
    TABLE.iter().copied().find(|d| d.name == name)
}
