//! The span that counts: after a warm-up, with the proxy's CPU time at both of its ends.

use std::error::Error;

use serde_json::{Value, json};

use crate::clock::{cpu_ns, now_ns};
use crate::options::Options;

/// The span, and what was measured in it.
pub(crate) struct Window {
    begin_ns: u64,
    end_ns: u64,
    pid: i32,
    cpu_begin_ns: Option<u64>,
    took_ns: Vec<u64>,
}

impl Window {
    /// Begin with the warm-up of `--warm-up` seconds; `--seconds` follow, of the process `--pid`, 0 being none.
    pub(crate) fn open(options: &Options) -> Result<Self, Box<dyn Error>> {
        let begin_ns = now_ns() + options.span_ns("warm-up")?;
        let end_ns = begin_ns + options.span_ns("seconds")?;
        Ok(Self { begin_ns, end_ns, pid: options.get("pid")?, cpu_begin_ns: None, took_ns: Vec::new() })
    }

    /// Note what ended at `now` and how long it took.
    pub(crate) fn note(&mut self, now_ns: u64, took_ns: u64) {
        if self.begin_ns <= now_ns && now_ns < self.end_ns {
            self.took_ns.push(took_ns);
        }
    }

    /// Whether it is over; to be asked again and again, for it reads the CPU time at the begin.
    pub(crate) fn over(&mut self, now_ns: u64) -> bool {
        if self.cpu_begin_ns.is_none() && now_ns >= self.begin_ns {
            self.cpu_begin_ns = Some(self.cpu_ns());
        }
        now_ns >= self.end_ns
    }

    /// What was measured.
    pub(crate) fn close(mut self, faults: u64) -> Value {
        let cpu_ns = self.cpu_ns() - self.cpu_begin_ns.unwrap_or_default();
        self.took_ns.sort_unstable();
        let at = |percent: usize| {
            let index = (self.took_ns.len() * percent / 100).min(self.took_ns.len().saturating_sub(1));
            self.took_ns.get(index).copied()
        };
        json!({
            "count": self.took_ns.len(),
            "span_ns": self.end_ns - self.begin_ns,
            "faults": faults,
            "p50_ns": at(50),
            "p99_ns": at(99),
            "cpu_ns": cpu_ns,
        })
    }

    fn cpu_ns(&self) -> u64 {
        if self.pid == 0 { 0 } else { cpu_ns(self.pid).unwrap_or_default() }
    }
}
