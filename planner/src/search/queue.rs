//! Candidates that wait to be solved, by the least that they can take.

use super::candidates::Candidate;

/// A candidate that waits.
pub(super) struct Waiting {
    /// No plan of it takes less.
    pub bound: f64,
    /// In order of arrival.
    at: usize,
    /// Which.
    pub candidate: Candidate,
    /// Whether the bound is its own. Otherwise it is that of the candidate without recomputation, of which a variant
    /// does all the work and more: its graph is made only when its turn comes.
    pub measured: bool,
    /// Bytes that a rank surely allocates, or more: of those that wait, the one with the least most likely fits.
    pub memory: u64,
}

/// All that wait.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Vec<Waiting>,
    arrived: usize,
}

impl Queue {
    /// Adds a candidate.
    pub fn push(&mut self, bound: f64, candidate: Candidate, measured: bool, memory: u64) {
        self.waiting.push(Waiting { bound, at: self.arrived, candidate, measured, memory });
        self.arrived += 1;
    }
    /// Takes the candidate with the least bound; of equal ones that which came first.
    pub fn take(&mut self) -> Option<Waiting> {
        let key = |w: &Waiting| (w.bound, w.at);
        let least = self.waiting.iter().enumerate().min_by(|a, b| {
            let ((a, i), (b, j)) = (key(a.1), key(b.1));
            a.total_cmp(&b).then(i.cmp(&j))
        });
        let at = least.map(|(at, _)| at)?;
        Some(self.waiting.swap_remove(at))
    }
    /// Takes the candidate with the least memory; of equal ones that with the least bound.
    pub fn take_smallest(&mut self) -> Option<Waiting> {
        let least =
            self.waiting.iter().enumerate().min_by(|(_, a), (_, b)| {
                a.memory.cmp(&b.memory).then(a.bound.total_cmp(&b.bound)).then(a.at.cmp(&b.at))
            });
        let at = least.map(|(at, _)| at)?;
        Some(self.waiting.swap_remove(at))
    }
    /// The least bound of those that wait.
    pub fn least(&self) -> f64 {
        self.waiting.iter().map(|w| w.bound).fold(f64::INFINITY, f64::min)
    }
    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }
}
