//! The operator table.
//!
//! To add an operator: one file here with its [`OpDef`], and one line in [`TABLE`].

use crate::op::OpDef;

pub mod attention;
pub mod binary;
pub mod cast;
pub mod compare;
pub mod composites;
pub mod concat;
pub mod conv;
pub mod cross_entropy;
pub mod dropout;
pub mod einsum;
pub mod expand;
pub mod experts;
pub mod gather;
pub mod gather_nd;
pub mod iota;
pub mod norm;
pub mod optimizer;
pub mod pad;
pub mod pool;
pub(crate) mod real;
pub mod reduce;
pub mod reshape;
pub mod rotary;
pub(crate) mod rules;
pub mod scan;
pub mod scatter;
pub mod slice;
pub mod softmax;
pub(crate) mod support;
pub mod top_k;
pub mod transpose;
pub mod unary;
pub(crate) mod window;

/// Every operator, by file.
pub static TABLE: &[&OpDef] = &[
    &attention::ATTENTION,
    &attention::ATTENTION_GRAD,
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
    &concat::CONCAT,
    &conv::CONV,
    &conv::CONV_GRAD_INPUT,
    &conv::CONV_GRAD_WEIGHT,
    &cross_entropy::CROSS_ENTROPY_PARTS,
    &cross_entropy::CROSS_ENTROPY_GRAD,
    &dropout::DROPOUT,
    &einsum::EINSUM,
    &expand::EXPAND,
    &experts::EXPERT_MAT_MUL,
    &experts::EXPERT_MAT_MUL_GRAD,
    &gather::GATHER,
    &gather::SCATTER_ADD,
    &gather::GATHER_ELEMENTS,
    &gather::GATHER_ELEMENTS_GRAD,
    &gather_nd::GATHER_ND,
    &gather_nd::GATHER_ND_GRAD,
    &iota::IOTA,
    &norm::LAYER_NORM,
    &norm::LAYER_NORM_GRAD,
    &norm::RMS_NORM,
    &norm::RMS_NORM_GRAD,
    &optimizer::ACCUMULATE,
    &optimizer::ADAMW,
    &optimizer::SGD,
    &pad::PAD,
    &pool::MAX_POOL,
    &pool::MAX_POOL_GRAD,
    &pool::AVERAGE_POOL,
    &pool::AVERAGE_POOL_GRAD,
    &reduce::REDUCE_SUM,
    &reduce::REDUCE_MAX,
    &reduce::REDUCE_MIN,
    &reduce::REDUCE_PROD,
    &reduce::ARG_MAX,
    &reshape::RESHAPE,
    &rotary::ROTARY_EMBEDDING,
    &scan::CUM_SUM,
    &scan::TRILU,
    &scatter::SCATTER_ND,
    &scatter::SCATTER_ELEMENTS,
    &slice::SLICE,
    &softmax::SOFTMAX,
    &softmax::LOG_SOFTMAX,
    &softmax::SOFTMAX_GRAD,
    &top_k::TOP_K,
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

/// Every import rule of ONNX operators: those of the table's entries, and those of composites.
pub fn onnx_rules() -> impl Iterator<Item = &'static crate::onnx::import::OnnxRule> {
    TABLE.iter().flat_map(|d| d.onnx).chain(composites::RULES)
}

/// The operator of that name.
pub fn find(name: &str) -> Option<&'static OpDef> {
    TABLE.iter().copied().find(|d| d.name == name)
}
