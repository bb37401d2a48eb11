//! Where the ranks of a group sit: which tiers of the cluster a collective crosses.
//!
//! Ranks are laid out contiguously: rank `r` is device `r` of the cluster, so domain `r / d` of a tier whose domains
//! hold `d` devices. All groups `{b, b + stride, ...}` of a mesh axis communicate at the same time; costs are those of
//! the worst placed one.

use crate::hardware::Cluster;

/// The ranks `r, r + stride, ..., r + (size-1) * stride`, for every `r` that starts such a group of a mesh axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Number of members; at least 1.
    pub size: usize,
    /// Distance in ranks between neighbours; at least 1.
    pub stride: usize,
}

impl Group {
    /// A group of `size` ranks, `stride` apart. Zeros are taken as 1.
    pub fn new(size: usize, stride: usize) -> Group {
        Group { size: size.max(1), stride: stride.max(1) }
    }
    /// Neighbouring ranks.
    pub fn contiguous(size: usize) -> Group {
        Group::new(size, 1)
    }
    /// The number of domains of `d` devices that the worst placed group touches.
    ///
    /// Groups come in blocks of `size * stride` ranks: block `b` holds the groups that start at
    /// `b * size * stride + o`, for `o < stride`.
    pub fn domains(&self, d: usize, gpus: usize) -> usize {
        let (size, stride) = (self.size, self.stride);
        let block = size * stride;
        if d.is_multiple_of(block) {
            return 1;
        }
        if stride.is_multiple_of(d) {
            return size;
        }
        if block.is_multiple_of(d) && d.is_multiple_of(stride) {
            return block / d;
        }
        let blocks = (gpus / block).clamp(1, d);
        let mut worst = 1;
        for b in 0..blocks {
            for o in 0..stride {
                let mut touched = 0;
                let mut last = None;
                for i in 0..size {
                    let domain = (b * block + o + i * stride) / d;
                    if last != Some(domain) {
                        touched += 1;
                        last = Some(domain);
                    }
                }
                worst = worst.max(touched);
            }
        }
        worst
    }
}

impl Cluster {
    /// Per tier, innermost first, how many of its domains the group touches; 1 from the spanning tier on.
    pub fn spans(&self, group: Group) -> Vec<usize> {
        let mut spans: Vec<usize> = Vec::with_capacity(self.tiers.len());
        for tier in &self.tiers {
            let n = match (spans.last(), tier.devices) {
                (Some(1), _) | (_, None) => 1,
                (_, Some(d)) => group.domains(d, self.gpus),
            };
            spans.push(n);
        }
        spans
    }
    /// The index of the innermost tier that holds every such group whole; the outermost one when none does.
    pub fn spanning_tier(&self, group: Group) -> usize {
        let spans = self.spans(group);
        spans.iter().position(|n| *n == 1).unwrap_or(self.tiers.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_of_groups() {
        // size, stride, devices per domain, gpus -> domains touched
        let table = [
            (8, 1, 8, 16, 1),
            (2, 4, 8, 16, 1),
            (16, 1, 8, 16, 2),
            (4, 8, 8, 32, 4),
            (2, 16, 8, 32, 2),
            (8, 4, 8, 32, 4),
            // 6 neighbours on nodes of 8: ranks 6..12 touch two nodes.
            (6, 1, 8, 24, 2),
            // 3 ranks 4 apart on nodes of 8: {0, 4, 8} touches two.
            (3, 4, 8, 24, 2),
            // 3 ranks 3 apart on nodes of 8: {2, 5, 8}.
            (3, 3, 8, 9, 2),
            (1, 1, 8, 8, 1),
        ];
        for (size, stride, d, gpus, expected) in table {
            assert_eq!(Group::new(size, stride).domains(d, gpus), expected, "{size} x {stride} on {d}");
        }
    }

    /// The closed forms agree with counting.
    #[test]
    fn domains_agree_with_counting() {
        for size in 1..=9 {
            for stride in 1..=9 {
                for d in [1, 2, 4, 6, 8] {
                    let gpus = size * stride * 2 * d;
                    let group = Group::new(size, stride);
                    let count = (0..gpus)
                        .filter(|r| r % (size * stride) < stride)
                        .map(|r| {
                            let mut domains: Vec<usize> = (0..size).map(|i| (r + i * stride) / d).collect();
                            domains.dedup();
                            domains.len()
                        })
                        .max()
                        .unwrap_or(1);
                    assert_eq!(group.domains(d, gpus), count, "{group:?} on {d}");
                }
            }
        }
    }
}
