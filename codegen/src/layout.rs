//! Places buffers in memory by lifetime.
//!
//! The problem (dynamic storage allocation) is NP-hard; two heuristics are tried and the smaller result kept: largest
//! first at the lowest free offset, and in order of birth into the tightest hole. Every buffer takes [`place_bytes`].
//! The result is exact: the peak a plan states is the size computed here.

use autoshard_runtime::program::place_bytes;

/// A buffer to place: alive from `birth` to `death`, both included, in some count of instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime {
    /// Instruction that writes it first.
    pub birth: usize,
    /// Instruction that reads it last; at least `birth`.
    pub death: usize,
    /// Size in bytes.
    pub bytes: u64,
}

/// Where buffers were placed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// Byte offset of each buffer.
    pub offsets: Vec<u64>,
    /// Bytes needed in all.
    pub total: u64,
}

/// More buffers than this are placed by the faster heuristic alone.
const QUADRATIC_LIMIT: usize = 6000;

/// Places buffers so that no two that are alive together overlap.
pub fn place(buffers: &[Lifetime]) -> Placement {
    let by_birth = in_order_of_birth(buffers);
    if buffers.len() > QUADRATIC_LIMIT {
        return by_birth;
    }
    let by_size = largest_first(buffers);
    if by_size.total < by_birth.total { by_size } else { by_birth }
}

fn largest_first(buffers: &[Lifetime]) -> Placement {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(buffers[i].bytes), buffers[i].birth, i));
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::new(); // by offset
    let mut total = 0;
    for i in order {
        let (b, size) = (buffers[i], place_bytes(buffers[i].bytes));
        let mut at = 0;
        for &p in &placed {
            let q = buffers[p];
            if q.death < b.birth || b.death < q.birth {
                continue;
            }
            if at + size <= offsets[p] {
                break;
            }
            at = at.max(offsets[p] + place_bytes(q.bytes));
        }
        offsets[i] = at;
        total = total.max(at + size);
        let slot = placed.partition_point(|&p| offsets[p] <= at);
        placed.insert(slot, i);
    }
    Placement { offsets, total }
}

fn in_order_of_birth(buffers: &[Lifetime]) -> Placement {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&i| (buffers[i].birth, std::cmp::Reverse(buffers[i].bytes), i));
    let mut offsets = vec![0; buffers.len()];
    let mut total: u64 = 0;
    let mut holes: Vec<(u64, u64)> = Vec::new(); // (offset, bytes) by offset, not touching
    let mut alive: std::collections::BinaryHeap<std::cmp::Reverse<(usize, u64, u64)>> = Default::default();
    let free = |holes: &mut Vec<(u64, u64)>, at: u64, size: u64| {
        let i = holes.partition_point(|h| h.0 < at);
        holes.insert(i, (at, size));
        if i + 1 < holes.len() && holes[i].0 + holes[i].1 == holes[i + 1].0 {
            holes[i].1 += holes.remove(i + 1).1;
        }
        if i > 0 && holes[i - 1].0 + holes[i - 1].1 == holes[i].0 {
            holes[i - 1].1 += holes.remove(i).1;
        }
    };
    for i in order {
        let (b, size) = (buffers[i], place_bytes(buffers[i].bytes));
        while let Some(&std::cmp::Reverse((death, at, bytes))) = alive.peek() {
            if death >= b.birth {
                break;
            }
            alive.pop();
            free(&mut holes, at, bytes);
        }
        let fit = holes.iter().enumerate().filter(|(_, h)| h.1 >= size).min_by_key(|(_, h)| (h.1, h.0)).map(|(k, _)| k);
        let at = if let Some(k) = fit {
            let (at, bytes) = holes[k];
            if bytes == size {
                holes.remove(k);
            } else {
                holes[k] = (at + size, bytes - size);
            }
            at
        } else {
            // Grow the end, from the last hole if it touches it.
            match holes.last().copied() {
                Some((at, bytes)) if at + bytes == total => {
                    holes.pop();
                    total = at + size;
                    at
                }
                _ => {
                    total += size;
                    total - size
                }
            }
        };
        offsets[i] = at;
        alive.push(std::cmp::Reverse((b.death, at, size)));
    }
    Placement { offsets, total }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autoshard_ir::tensor::ALIGN;
    use proptest::prelude::*;

    /// The largest sum of bytes alive at once: no placement can be smaller.
    fn lower_bound(buffers: &[Lifetime]) -> u64 {
        let mut events: Vec<(usize, i64)> = Vec::new();
        for b in buffers {
            events.push((b.birth, place_bytes(b.bytes) as i64));
            events.push((b.death + 1, -(place_bytes(b.bytes) as i64)));
        }
        // At equal times deaths (negative) come first.
        events.sort_unstable();
        let (mut now, mut peak) = (0i64, 0i64);
        for (_, delta) in events {
            now += delta;
            peak = peak.max(now);
        }
        peak as u64
    }

    fn check(buffers: &[Lifetime], p: &Placement) {
        for i in 0..buffers.len() {
            let a = buffers[i];
            assert_eq!(p.offsets[i] % ALIGN as u64, 0);
            assert!(p.offsets[i] + a.bytes <= p.total);
            for (j, b) in buffers.iter().enumerate().take(i) {
                let together = a.birth <= b.death && b.birth <= a.death;
                let overlap = p.offsets[i] < p.offsets[j] + b.bytes && p.offsets[j] < p.offsets[i] + a.bytes;
                assert!(!(together && overlap), "{a:?} at {} and {b:?} at {}", p.offsets[i], p.offsets[j]);
            }
        }
        assert!(p.total >= lower_bound(buffers));
    }

    #[test]
    fn a_chain_needs_two_buffers() {
        let chain: Vec<Lifetime> = (0..10).map(|i| Lifetime { birth: i, death: i + 1, bytes: 64 }).collect();
        assert_eq!(place(&chain).total, 128);
    }

    proptest! {
        #[test]
        fn nothing_alive_overlaps(raw in prop::collection::vec((0usize..40, 0usize..10, 0u64..1000), 0..60)) {
            let buffers: Vec<Lifetime> =
                raw.into_iter().map(|(birth, len, bytes)| Lifetime { birth, death: birth + len, bytes }).collect();
            check(&buffers, &largest_first(&buffers));
            check(&buffers, &in_order_of_birth(&buffers));
        }
    }
}
