//! cost_models
