//! How much memory this host has left.
//!
//! On Linux: `MemAvailable` of `/proc/meminfo`, and the limit of the control group where one is seen at its mount (version 2, as in
//! a container). Elsewhere unknown.

/// Bytes that can still be used without swapping, where that can be known.
pub fn available() -> Option<u64> {
    let host = meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|max| {
        let current = std::fs::read_to_string("/sys/fs/cgroup/memory.current").ok()?;
        let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
        cgroup(&max, &current, &stat)
    });
    Some(group.map_or(host, |g| g.min(host)))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// What a control group has left: its limit less what it uses, file caches not counted.
fn cgroup(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let cache: u64 = stat
        .lines()
        .filter_map(|l| l.strip_prefix("inactive_file ").or_else(|| l.strip_prefix("active_file ")))
        .filter_map(|n| n.trim().parse::<u64>().ok())
        .sum();
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

/// Bytes for people: `3.2 GiB`.
pub fn show(bytes: u64) -> String {
    let mut x = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if x < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{x:.1} {unit}") };
        }
        x /= 1024.0;
    }
    format!("{x:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_says() {
        assert_eq!(meminfo("MemTotal: 9 kB\nMemAvailable:    7 kB\n"), Some(7 * 1024));
        assert_eq!(meminfo("MemTotal: 9 kB\n"), None);
        assert_eq!(cgroup("max\n", "5\n", ""), None);
        assert_eq!(cgroup("100\n", "50\n", "anon 3\ninactive_file 10\nactive_file 5\n"), Some(65));
        assert_eq!(show(1023), "1023 B");
        assert_eq!(show(3 << 29), "1.5 GiB");
    }
}
