//! What a process does: endless decoding, steps of mixed lengths, requests with pauses between them.

use std::time::Duration;

use super::Random;

/// CPU part of a step that does not sample for a whole batch.
const CPU_US: u64 = 400;

/// One thing to do.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    /// A pass of the inference loop; `first` of its request. A CPU part of `None` never ends.
    Step { gpu_us: u64, cpu_us: Option<u64>, first: bool },
    /// No request for so long.
    Think(u64),
}

/// A process's endless list of things to do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    kind: Kind,
    /// Decode steps left of the running request; `None` before the first.
    left: Option<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Steady {
        gpu_us: u64,
        cpu_us: u64,
    },
    /// 80 % of 8 ms, 15 % of 16 ms, 5 % of 60 ms.
    Mixture,
    Chat {
        prefill_us: u64,
        steps: u32,
        gpu_us: u64,
        think_ms: u64,
    },
    Hung,
}

impl Work {
    /// One request that never ends, in steps of `gpu_us`.
    pub(crate) fn steady(gpu_us: u64) -> Self {
        Self::batched(gpu_us, CPU_US)
    }

    /// As `steady`, with a longer CPU part.
    pub(crate) fn batched(gpu_us: u64, cpu_us: u64) -> Self {
        Self { kind: Kind::Steady { gpu_us, cpu_us }, left: None }
    }

    /// One request that never ends, in steps of 8, 16 and 60 ms.
    pub(crate) fn mixture() -> Self {
        Self { kind: Kind::Mixture, left: None }
    }

    /// Requests of a prefill and `steps` decode steps, `think_ms` apart on average; 0: back to back.
    pub(crate) fn chat(prefill_ms: u64, steps: u32, gpu_us: u64, think_ms: u64) -> Self {
        Self { kind: Kind::Chat { prefill_us: prefill_ms * 1000, steps, gpu_us, think_ms }, left: None }
    }

    /// A last step whose CPU part never ends.
    pub(crate) fn hung() -> Self {
        Self { kind: Kind::Hung, left: Some(0) }
    }

    pub(crate) fn next(&mut self, random: &mut Random) -> Op {
        let first = self.left.is_none();
        match self.kind {
            Kind::Steady { gpu_us, cpu_us } => {
                self.left = Some(0);
                Op::Step { gpu_us: random.around(gpu_us, 3), cpu_us: Some(cpu_us), first }
            }
            Kind::Mixture => {
                self.left = Some(0);
                let gpu_us = match random.between(1, 100) {
                    ..=80 => 8000,
                    81..=95 => 16_000,
                    _ => 60_000,
                };
                Op::Step { gpu_us: random.around(gpu_us, 5), cpu_us: Some(CPU_US), first }
            }
            Kind::Chat { prefill_us, steps, gpu_us, think_ms } => {
                self.chat_next(random, prefill_us, steps, gpu_us, think_ms)
            }
            Kind::Hung => Op::Step { gpu_us: 8000, cpu_us: None, first },
        }
    }

    fn chat_next(
        &mut self,
        random: &mut Random,
        prefill_us: u64,
        steps: u32,
        gpu_us: u64,
        think_ms: u64,
    ) -> Op {
        match self.left {
            None => {
                self.left = Some(steps);
                Op::Think(random.between(0, think_ms.max(1) * 1000))
            }
            Some(left) if left == steps => {
                self.left = Some(left - 1);
                Op::Step { gpu_us: random.around(prefill_us, 20), cpu_us: Some(CPU_US), first: true }
            }
            // The step count includes the prefill; `u32::MAX` says that the pause is due.
            Some(u32::MAX) => {
                self.left = Some(steps);
                let think = random.exponential(Duration::from_millis(think_ms.max(1)));
                Op::Think(if think_ms == 0 { 1000 } else { think })
            }
            Some(left) => {
                self.left = Some(left.wrapping_sub(1));
                Op::Step { gpu_us: random.around(gpu_us, 3), cpu_us: Some(CPU_US), first: false }
            }
        }
    }
}
