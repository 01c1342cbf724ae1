//! The processes' lives: heartbeats, requests, steps, and what goes wrong with them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use ocgpu_core::schedule::Want;

use super::device::Device;
use super::peer::{Peer, Position, State};
use super::turns::Token;
use super::workload::Op;
use super::{Kind, Random, Work};

const HEARTBEAT_US: u64 = 500_000;
/// The seed's activity window.
const ACTIVE_FOR_US: u64 = 2_000_000;
/// Where the wall clock stands at the start.
const WALL_START_US: i64 = 1_000_013_700;

/// What the schedule says at the gate.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gate {
    Run,
    Wait { until_us: u64 },
}

/// What turn mode does about an ungated peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ungated {
    /// Its turn is waited out.
    WaitedOut,
    /// Everybody takes the grid while it is active.
    OnGrid,
    /// It is no member of the round.
    Ignored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill,
    Stop,
    Continue,
    /// The next step's CPU part never ends; the heartbeat goes on.
    Hang,
    /// The wall clock jumps by so many seconds.
    Clock(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    Beat,
    Next,
    /// Look at the gate, unless a later attempt has been made.
    Look(u64),
    /// The card is through with the step.
    Finished,
    /// The process sees that.
    Synchronised,
    Fault(usize),
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now_us: u64,
    pub(crate) warm_us: u64,
    pub(crate) random: Random,
    pub(crate) token: Token,
    pub(crate) peers: Vec<Peer>,
    pub(crate) ungated: Ungated,
    pub(crate) steals: u32,
    /// The card idle and nobody in a CPU part, while somebody was held back.
    pub(crate) wasted_us: u64,
    pub(crate) free_since_us: Option<u64>,
    pub(crate) device: Device,
    wall_shift_us: i64,
    faults: Vec<Fault>,
    events: BinaryHeap<Reverse<(u64, u64, usize, Event)>>,
    posted: u64,
}

impl World {
    /// Processes of these kinds, weights and works; measured from `warm_us` on.
    pub(crate) fn new(peers: &[(Kind, u32, Work)], seed: u64, warm_us: u64) -> Self {
        let count = peers.len();
        let peers =
            peers.iter().map(|(kind, weight, work)| Peer::new(*kind, *weight, *work, count)).collect();
        let mut world = Self {
            now_us: 0,
            warm_us,
            random: Random::new(seed),
            token: Token::default(),
            peers,
            ungated: Ungated::WaitedOut,
            steals: 0,
            wasted_us: 0,
            free_since_us: None,
            device: Device::default(),
            wall_shift_us: WALL_START_US,
            faults: Vec::new(),
            events: BinaryHeap::new(),
            posted: 0,
        };
        for slot in 0..count {
            let (beat_us, start_us) = (world.random.between(0, HEARTBEAT_US), world.random.between(0, 5000));
            world.beat(slot);
            world.post(beat_us, slot, Event::Beat);
            world.post(start_us, slot, Event::Next);
        }
        world
    }

    /// Let `fault` happen to `slot` at this time.
    pub(crate) fn plan(&mut self, at_us: u64, slot: usize, fault: Fault) {
        self.faults.push(fault);
        self.post(at_us, slot, Event::Fault(self.faults.len() - 1));
    }

    pub(crate) fn run_until(&mut self, end_us: u64) {
        while let Some(Reverse((at_us, _, slot, event))) = self.events.pop() {
            if at_us > end_us {
                self.post(at_us, slot, event);
                break;
            }
            self.pass_time(at_us);
            self.handle(slot, event);
        }
        self.pass_time(end_us);
    }

    /// When the steps of `slot` ended.
    pub(crate) fn ends_us(&self, slot: usize) -> &[u64] {
        &self.peers[slot].tally.ends_us
    }

    pub(crate) fn wall_us(&self) -> i64 {
        self.now_us.cast_signed() + self.wall_shift_us
    }

    /// The gate of `slot` is looked at, at this time at the latest.
    pub(crate) fn look_again(&mut self, slot: usize, at_us: u64) {
        let attempt = self.peers[slot].attempt;
        self.post(at_us, slot, Event::Look(attempt));
    }

    fn post(&mut self, at_us: u64, slot: usize, event: Event) {
        self.posted += 1;
        self.events.push(Reverse((at_us, self.posted, slot, event)));
    }

    fn pass_time(&mut self, to_us: u64) {
        let sampling = || self.peers.iter().any(|peer| peer.position == Position::Cpu);
        if self.device.is_idle() && self.peers.iter().any(Peer::waits) && !sampling() {
            self.wasted_us += to_us - self.now_us.max(self.warm_us).min(to_us);
        }
        self.now_us = to_us;
        self.check_token();
    }

    fn handle(&mut self, slot: usize, event: Event) {
        match event {
            Event::Fault(index) => return self.fault(slot, self.faults[index]),
            Event::Finished => {
                let started = self.device.finish();
                self.started(started);
                return self.post(self.now_us, slot, Event::Synchronised);
            }
            _ => {}
        }
        match self.peers[slot].state {
            State::Dead => {}
            State::Stopped => self.peers[slot].deferred.push(event),
            State::Running => self.act(slot, event),
        }
    }

    fn act(&mut self, slot: usize, event: Event) {
        match event {
            Event::Beat => {
                self.beat(slot);
                self.post(self.now_us + HEARTBEAT_US, slot, Event::Beat);
            }
            Event::Next => self.next(slot),
            Event::Look(attempt) if attempt == self.peers[slot].attempt => self.look(slot, false),
            Event::Synchronised => self.synchronised(slot),
            Event::Look(_) | Event::Finished | Event::Fault(_) => {}
        }
    }

    fn beat(&mut self, slot: usize) {
        let wall_us = self.wall_us();
        let peer = &mut self.peers[slot];
        peer.words.heartbeat_us = wall_us;
        peer.words.beats += 1;
        peer.turn.beat_at_us = self.now_us;
        let recent = peer.turn.last_activity_us.is_some_and(|at_us| self.now_us - at_us <= ACTIVE_FOR_US);
        let works = recent || peer.waits();
        peer.words.active = works && (peer.kind == Kind::Seed || peer.words.in_request);
    }

    fn next(&mut self, slot: usize) {
        match self.peers[slot].work.next(&mut self.random) {
            Op::Think(pause_us) => {
                if self.peers[slot].words.in_request {
                    self.close_request(slot);
                }
                self.post(self.now_us + pause_us, slot, Event::Next);
            }
            Op::Step { gpu_us, cpu_us, first } => {
                let peer = &mut self.peers[slot];
                (peer.gpu_us, peer.cpu_us) = (gpu_us, cpu_us);
                peer.position = Position::Gate { since_us: self.now_us, waits: false };
                if first {
                    self.open_request(slot);
                }
                self.look(slot, first);
            }
        }
    }

    fn open_request(&mut self, slot: usize) {
        let peer = &mut self.peers[slot];
        peer.words.in_request = true;
        peer.words.active = true;
        peer.tally.requested_us = self.now_us;
        peer.tally.previous_us = None;
        self.progress(slot);
        self.turn_arrive(slot);
    }

    fn close_request(&mut self, slot: usize) {
        let peer = &mut self.peers[slot];
        peer.position = Position::Thinking;
        peer.words.in_request = false;
        peer.words.active = peer.kind == Kind::Seed;
        peer.turn.last_activity_us = Some(self.now_us);
        peer.tally.previous_us = None;
        if self.token.holder == Some(slot) {
            self.pass_token(slot, slot);
        }
    }

    fn look(&mut self, slot: usize, first: bool) {
        let Position::Gate { since_us, .. } = self.peers[slot].position else { return };
        self.peers[slot].attempt += 1;
        match self.gate(slot, first, since_us) {
            Gate::Run => self.begin(slot, since_us),
            Gate::Wait { until_us } => {
                self.check_not_alone(slot);
                self.peers[slot].position = Position::Gate { since_us, waits: true };
                let oversleep_us = 60 + self.random.exponential(Duration::from_micros(80));
                self.look_again(slot, until_us + oversleep_us);
            }
        }
    }

    fn gate(&mut self, slot: usize, first: bool, since_us: u64) -> Gate {
        let kind = self.peers[slot].kind;
        if kind == Kind::Ungated {
            return Gate::Run;
        }
        if kind != Kind::Turn || self.on_grid() {
            self.peers[slot].turn.ran_on_grid = true;
            self.peers[slot].words.want = Want::Nothing;
            if self.token.holder.is_some_and(|holder| holder == slot || kind == Kind::Turn) {
                self.free_token();
            }
            return self.window_gate(slot, first);
        }
        self.turn_gate(slot, since_us)
    }

    fn begin(&mut self, slot: usize, since_us: u64) {
        self.check_exclusion(slot);
        self.progress(slot);
        let (now_us, warm_us) = (self.now_us, self.warm_us);
        let peer = &mut self.peers[slot];
        peer.position = Position::Step;
        peer.turn.stolen = false;
        peer.turn.begun_us = now_us;
        peer.turn.last_activity_us = Some(now_us);
        if now_us > warm_us {
            peer.tally.waited_us += now_us - since_us;
            peer.tally.longest_wait_us = peer.tally.longest_wait_us.max(now_us - since_us);
        }
        let started = self.device.submit(slot, peer.gpu_us);
        self.started(started);
    }

    fn started(&mut self, started: Option<(usize, u64)>) {
        if let Some((slot, takes_us)) = started {
            self.post(self.now_us + takes_us, slot, Event::Finished);
        }
    }

    fn synchronised(&mut self, slot: usize) {
        let (now_us, warm_us) = (self.now_us, self.warm_us);
        let peer = &mut self.peers[slot];
        peer.tally.count(now_us, warm_us, peer.gpu_us + peer.cpu_us.unwrap_or(0));
        peer.turn.last_activity_us = Some(now_us);
        peer.position = Position::Cpu;
        let cpu_us = peer.cpu_us;
        self.progress(slot);
        if self.peers[slot].takes_turns() && !self.peers[slot].turn.ran_on_grid {
            self.turn_done(slot);
        }
        if let Some(cpu_us) = cpu_us {
            self.post(self.now_us + cpu_us, slot, Event::Next);
        }
    }

    fn progress(&mut self, slot: usize) {
        self.peers[slot].words.progress += 1;
        self.peers[slot].turn.progress_at_us = self.now_us;
    }

    fn fault(&mut self, slot: usize, fault: Fault) {
        let peer = &mut self.peers[slot];
        match fault {
            Fault::Kill => {
                peer.state = State::Dead;
                peer.turn.died_us = self.now_us;
            }
            Fault::Stop => peer.state = State::Stopped,
            Fault::Hang => peer.work = Work::hung(),
            Fault::Clock(seconds) => self.wall_shift_us += seconds * 1_000_000,
            Fault::Continue => {
                peer.state = State::Running;
                for event in std::mem::take(&mut peer.deferred) {
                    self.post(self.now_us, slot, event);
                }
            }
        }
    }
}
