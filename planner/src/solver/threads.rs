//! Independent tasks on several threads, results in order.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The results of tasks `0..count`, in this order whatever the number of threads.
pub(crate) fn map<T: Send>(count: usize, threads: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if threads <= 1 || count <= 1 {
        return (0..count).map(task).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::with_capacity(count));
    let work = || {
        loop {
            let k = next.fetch_add(1, Ordering::Relaxed);
            if k >= count {
                break;
            }
            let result = task(k);
            // A panic of a task ends the scope below, so a poisoned list is never read.
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((k, result));
        }
    };
    std::thread::scope(|scope| {
        (1..threads.min(count)).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_unstable_by_key(|(k, _)| *k);
    done.into_iter().map(|(_, result)| result).collect()
}
