//! The card: a FIFO of steps, not preemptible.

use std::collections::VecDeque;

/// Lost when the card changes hands: a context switch, a cold cache.
const SWITCH_US: u64 = 1000;

#[derive(Debug, Default)]
pub(crate) struct Device {
    queue: VecDeque<(usize, u64)>,
    current: Option<usize>,
    last_owner: Option<usize>,
}

impl Device {
    /// Queue a step of `slot`. Answers with how long the card takes, when it starts on it at once.
    pub(crate) fn submit(&mut self, slot: usize, gpu_us: u64) -> Option<(usize, u64)> {
        self.queue.push_back((slot, gpu_us));
        if self.current.is_some() { None } else { self.start() }
    }

    /// The current step is through. Answers with whose is next and how long it takes.
    pub(crate) fn finish(&mut self) -> Option<(usize, u64)> {
        self.current = None;
        self.start()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.current.is_none()
    }

    fn start(&mut self) -> Option<(usize, u64)> {
        let (slot, gpu_us) = self.queue.pop_front()?;
        let switch_us = if self.last_owner == Some(slot) { 0 } else { SWITCH_US };
        self.current = Some(slot);
        self.last_owner = Some(slot);
        Some((slot, gpu_us + switch_us))
    }
}
