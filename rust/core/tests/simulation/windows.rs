//! The seed's gate: windows over the wall clock, asked after each step, so that a request's first step runs at once.

use ocgpu_core::schedule::{Grid, Roster};

use super::Kind;
use super::world::{Gate, World};

/// A heartbeat older than this is a dead peer's; one from the future counts as alive.
const DEAD_AFTER_US: i64 = 3_000_000;

impl World {
    pub(crate) fn window_gate(&self, slot: usize, first: bool) -> Gate {
        let mut roster = Roster::default();
        for (other, peer) in self.peers.iter().enumerate() {
            if other == slot || self.seems_active(other) {
                roster.insert(other, peer.words.weight_milli);
            }
        }
        if first || roster.len() == 1 {
            return Gate::Run;
        }
        match Grid::new(&roster).wait_us(slot, self.wall_us()) {
            0 => Gate::Run,
            wait => Gate::Wait { until_us: self.now_us + wait },
        }
    }

    /// Whether somebody active keeps everybody on the grid.
    pub(crate) fn on_grid(&self) -> bool {
        let wants = |kind| match kind {
            Kind::Turn => false,
            Kind::Grid | Kind::Seed => true,
            Kind::Ungated => self.ungated == super::Ungated::OnGrid,
        };
        let mut peers = self.peers.iter().enumerate();
        peers.any(|(slot, peer)| wants(peer.kind) && self.seems_active(slot))
    }

    /// The seed's rule.
    pub(crate) fn seems_active(&self, slot: usize) -> bool {
        let words = &self.peers[slot].words;
        words.active && self.wall_us() - words.heartbeat_us <= DEAD_AFTER_US
    }
}
