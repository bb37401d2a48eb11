//! What the system says of this machine: processor, cores, memory, date. From `/proc`; elsewhere what can be known.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use autoshard_cost_models::Bytes;

/// This machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Of the processor.
    pub name: String,
    /// Cores that this process may use, each counted once however many threads it runs.
    pub cores: usize,
    /// Memory in all.
    pub memory: Bytes,
    /// Of that, what other programs do not use.
    pub available: Bytes,
}

impl Host {
    /// Asks the system.
    pub fn read() -> Option<Host> {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let available = Bytes(autoshard_runtime::memory::available()?);
        let total = std::fs::read_to_string("/proc/meminfo").ok().and_then(|t| total(&t));
        Some(Host {
            name: name(&cpu).unwrap_or_else(|| "CPU".into()),
            cores: cores(&cpu).unwrap_or(threads).min(threads),
            memory: total.map_or(available, |t| Bytes(t.0.max(available.0))),
            available,
        })
    }
}

fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (name, value) = line.split_once(':')?;
    (name.trim() == key).then(|| value.trim())
}

/// The processor's name.
fn name(cpuinfo: &str) -> Option<String> {
    let found = cpuinfo.lines().find_map(|l| field(l, "model name"))?;
    let words: Vec<&str> = found.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// Distinct cores of all sockets; none where the system does not say.
fn cores(cpuinfo: &str) -> Option<usize> {
    let mut socket = "";
    let mut found = BTreeSet::new();
    for line in cpuinfo.lines() {
        if let Some(s) = field(line, "physical id") {
            socket = s;
        } else if let Some(core) = field(line, "core id") {
            found.insert((socket, core));
        }
    }
    (!found.is_empty()).then_some(found.len())
}

fn total(meminfo: &str) -> Option<Bytes> {
    let value = meminfo.lines().find_map(|l| field(l, "MemTotal"))?;
    Some(Bytes(value.split_whitespace().next()?.parse::<u64>().ok()? * 1024))
}

/// Today, in UTC: `2026-03-01`.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86400)
}

/// The date that many days after 1970-01-01 (Hinnant, "chrono-compatible low-level date algorithms").
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    format!("{:04}-{month:02}-{day:02}", year + era * 400 + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_THREADS_PER_CORE: &str = "processor\t: 0\nmodel name\t: Some CPU  @ 2 GHz\nphysical id\t: 0\ncore id\t\t: 0\n\n\
        processor\t: 1\nmodel name\t: Some CPU  @ 2 GHz\nphysical id\t: 0\ncore id\t\t: 1\n\n\
        processor\t: 2\nmodel name\t: Some CPU  @ 2 GHz\nphysical id\t: 0\ncore id\t\t: 0\n\n\
        processor\t: 3\nmodel name\t: Some CPU  @ 2 GHz\nphysical id\t: 1\ncore id\t\t: 0\n";

    #[test]
    fn threads_of_a_core_are_one_core() {
        assert_eq!(cores(TWO_THREADS_PER_CORE), Some(3));
        assert_eq!(name(TWO_THREADS_PER_CORE).as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!((cores("processor : 0\n"), name("")), (None, None));
    }

    #[test]
    fn memory_and_dates() {
        assert_eq!(total("MemTotal:       24683656 kB\nMemFree: 1 kB\n"), Some(Bytes(24_683_656 * 1024)));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        for (days, shown) in [(0, "1970-01-01"), (11_016, "2000-02-29"), (11_017, "2000-03-01"), (20_788, "2026-12-01")]
        {
            assert_eq!(date(days), shown);
        }
    }
}
