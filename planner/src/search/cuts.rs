//! Whether the batch may be cut into micro-batches: asked once per search, of [`micro_batchable`].

use std::rc::Rc;

use autoshard_ir::train::{Normalization, micro_batchable};

use super::{Search, SearchError};
use crate::mesh::divisors;
use crate::request::RecomputeChoice;

/// Whether the batch may be cut into micro-batches, seen at a batch that shows it.
#[derive(Default)]
pub(super) struct Cuts {
    /// What needs the whole batch.
    pub coupled: Option<String>,
    /// How the loss is put together.
    pub normalization: Option<Normalization>,
}

impl Search<'_> {
    /// See [`Cuts`].
    pub(super) fn cuts(&mut self) -> Result<Rc<Cuts>, SearchError> {
        if let Some(known) = &self.cuts {
            return Ok(known.clone());
        }
        // A batch of one does not show which dim is the batch. Any other does: first those whose step is there.
        let made = self.whole.keys().map(|(batch, _)| *batch);
        let others = divisors(self.request.workload.global_batch);
        let batches: Vec<usize> = made.chain(others).filter(|b| *b > 1).collect();
        let mut found = Cuts::default();
        for batch in batches {
            match self.whole(batch, RecomputeChoice::None) {
                Ok(step) => {
                    let reasons = micro_batchable(&step.graph).err().unwrap_or_default();
                    let texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                    found.coupled = (!texts.is_empty()).then(|| few(&texts));
                    found.normalization = step.normalization;
                    break;
                }
                Err(SearchError::Graph(_)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(self.cuts.insert(Rc::new(found)).clone())
    }
}

/// The first few of many reasons.
pub(super) fn few(reasons: &[String]) -> String {
    const SHOWN: usize = 4;
    let mut text = reasons[..reasons.len().min(SHOWN)].join("; ");
    if reasons.len() > SHOWN {
        text += &format!("; and {} more", reasons.len() - SHOWN);
    }
    text
}
