//! The peers around one slot, and every step that any of them can take next.

use crate::slot::{Age, Rule, Slot, Step, View};

/// Worlds that may follow: whose step leads there, and a word about it.
pub(crate) type Worlds = Vec<(World, usize, &'static str)>;

pub(crate) const LOCK: Option<Rule> = Some(Rule::Lock);
pub(crate) const SEED: Option<Rule> = Some(Rule::Seed);

/// What is searched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) rules: [Option<Rule>; 3],
    pub(crate) pids: [u8; 3],
    /// A new process may have the pid of one that died, as in containers.
    pub(crate) pids_return: [bool; 3],
    /// Slots that only silence condemns are freed after a settled look only.
    pub(crate) settle: bool,
    /// A peer of the seed that takes the slot of a running peer of ours counts as wrong. Nothing of ours can prevent it
    /// where pids are equal; it is noticed at the next beat.
    pub(crate) theft_is_wrong: bool,
    pub(crate) crashes: u8,
    pub(crate) stops: u8,
    /// Claims begun by all peers together.
    pub(crate) claims: u8,
}

/// One process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each may be true without the others")]
pub(crate) struct Peer {
    pub(crate) step: Step,
    pub(crate) stopped: bool,
    pub(crate) pid: u8,
    /// The number of its claim.
    pub(crate) claim: u8,
    pub(crate) seen: View,
    /// Something moved in the slot since it began to watch.
    disturbed: bool,
    /// It lost the slot: it was silent for too long, or a peer of the seed took it.
    forfeit: bool,
    /// A peer of the seed read an old heartbeat while it had the slot.
    silent: bool,
}

/// The slot, its lock and everybody around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) slot: Slot,
    lock: Option<usize>,
    pub(crate) peers: [Peer; 3],
    claims: u8,
    crashes: u8,
    stops: u8,
    /// What went wrong, once something has.
    pub(crate) wrong: Option<&'static str>,
}

impl World {
    /// A slot that its last owner left, long ago.
    pub(crate) fn new(setup: &Setup) -> Self {
        let slot =
            Slot { pid: 0, boot: 0, age: Age::Old, token: 0, owner_pid: 0, owner_boot: 0, claiming: false };
        Self {
            slot,
            lock: None,
            peers: setup.pids.map(fresh),
            claims: setup.claims,
            crashes: setup.crashes,
            stops: setup.stops,
            wrong: None,
        }
    }

    /// Every world that one step of anybody makes of this one.
    pub(crate) fn next(&self, setup: &Setup) -> Worlds {
        let mut worlds = Vec::new();
        for (who, rule) in setup.rules.iter().enumerate().filter_map(|(who, rule)| Some((who, (*rule)?))) {
            self.fates(who, setup, &mut worlds);
            if self.peers[who].stopped || self.peers[who].step == Step::Crashed {
                continue;
            }
            match rule {
                Rule::Lock => self.lock_steps(who, setup, &mut worlds),
                Rule::Seed => self.seed_steps(who, setup, &mut worlds),
            }
        }
        if self.slot.age != Age::Old && self.quiet(None) {
            let slot = Slot { age: Age::Old, ..self.slot };
            worlds.push((Self { slot, ..*self }, 0, "idles while time passes"));
        }
        worlds
    }

    /// Death, restart, stop and continuation of one peer.
    fn fates(&self, who: usize, setup: &Setup, worlds: &mut Worlds) {
        let peer = &self.peers[who];
        if peer.step == Step::Crashed {
            let pid = if setup.pids_return[who] { peer.pid } else { peer.pid + 10 };
            worlds.push((self.with(who, |peer| *peer = fresh(pid)), who, "starts anew"));
            return;
        }
        if self.crashes > 0 && peer.step != Step::Idle {
            let mut dead = self.with(who, |peer| {
                *peer = Peer { step: Step::Crashed, ..fresh(peer.pid) };
            });
            dead.crashes -= 1;
            dead.unlock(who);
            worlds.push((dead, who, "dies"));
        }
        if peer.stopped {
            worlds.push((self.with(who, |peer| peer.stopped = false), who, "goes on"));
        } else if self.stops > 0 && peer.step != Step::Idle {
            let mut stopped = self.with(who, |peer| peer.stopped = true);
            stopped.stops -= 1;
            worlds.push((stopped, who, "is stopped"));
        }
    }

    /// Whether seconds may pass: nobody who runs is in the middle of something that takes moments, or would beat.
    fn quiet(&self, watcher: Option<usize>) -> bool {
        let busy =
            |peer: &Peer| !peer.stopped && peer.step.passes() && !(watcher.is_some() && peer.step.looks());
        !self.peers.iter().enumerate().any(|(who, peer)| Some(who) != watcher && busy(peer))
    }

    fn seed_steps(&self, who: usize, setup: &Setup, worlds: &mut Worlds) {
        let peer = self.peers[who];
        let mut push = |world: Self, what| worlds.push((world, who, what));
        match peer.step {
            Step::Idle if self.claims > 0 => {
                let mut world = self.begin_claim(who);
                world.peers[who].seen = self.slot.view();
                world.go(who, if self.slot.pid == 0 { Step::SeedSwap } else { Step::SeedReadHeartbeat });
                push(world, "reads the pid");
            }
            Step::SeedReadHeartbeat => {
                let old = self.slot.age == Age::Old;
                let mut world = self.at(who, if old { Step::SeedSwap } else { Step::Idle });
                for peer in &mut world.peers {
                    peer.silent |= old && peer.step.has_slot();
                }
                push(world, "");
            }
            Step::SeedSwap => {
                let mut world = self.at(who, Step::Idle);
                if world.swap(who, peer.seen.pid, peer.pid) {
                    world.rob(who, setup);
                    world.go(who, Step::SeedStoreBoot);
                }
                push(world, "");
            }
            Step::SeedStoreBoot => {
                let mut world = self.at(who, Step::SeedStoreHeartbeat);
                world.store(who, |slot| slot.boot = peer.claim);
                push(world, "");
            }
            Step::SeedStoreHeartbeat => {
                let mut world = self.at(who, Step::SeedOwn);
                world.store(who, |slot| slot.age = Age::Young);
                push(world, "");
            }
            Step::SeedOwn => {
                let mut beaten = *self;
                beaten.store(who, |slot| slot.age = Age::Young);
                push(beaten, "beats");
                // It joins once in its life.
                let mut left = self.at(who, Step::Idle);
                left.swap(who, peer.pid, 0);
                left.go(who, Step::Crashed);
                push(left, "leaves");
            }
            _ => {}
        }
    }

    /// A swap of the seed's that takes the slot from whoever has it.
    fn rob(&mut self, thief: usize, setup: &Setup) {
        for (who, peer) in self.peers.iter_mut().enumerate().filter(|(who, _)| *who != thief) {
            if !peer.step.has_slot() || peer.forfeit {
                continue;
            }
            // One of ours that was seen with an old heartbeat was stopped for as long, and lost by the seed's rule.
            let counts = (setup.theft_is_wrong && !peer.silent) || setup.rules[who] == SEED;
            if !peer.stopped && counts {
                self.wrong = Some("a peer of the seed took the slot of one that runs");
            }
            peer.forfeit = true;
        }
    }

    /// A swap of ours that frees the slot: nobody may have it who lives and keeps the rules.
    pub(crate) fn free(&mut self, who: usize, pid: u8) -> bool {
        if !self.swap(who, pid, 0) {
            return false;
        }
        let others = self.peers.iter().enumerate().filter(|(other, _)| *other != who);
        if others.map(|(_, peer)| peer).any(|peer| peer.step.has_slot() && !peer.forfeit) {
            self.wrong = Some("a living peer's slot was freed");
        }
        true
    }

    pub(crate) fn swap(&mut self, who: usize, from: u8, to: u8) -> bool {
        let swapped = self.slot.pid == from;
        if swapped {
            self.store(who, |slot| slot.pid = to);
        }
        swapped
    }

    /// Change what a watcher takes for a sign of life.
    pub(crate) fn store(&mut self, who: usize, change: impl FnOnce(&mut Slot)) {
        change(&mut self.slot);
        for (other, peer) in self.peers.iter_mut().enumerate() {
            peer.disturbed |= other != who && peer.step.looks();
        }
    }

    pub(crate) fn begin_claim(&self, who: usize) -> Self {
        let mut world = self.with(who, |peer| *peer = fresh(peer.pid));
        world.claims -= 1;
        // Claims count down from a number that is told by `claims`, and up here.
        world.peers[who].claim = u8::MAX - world.claims;
        world
    }

    /// Take the owner's name out of the extension. What stood behind it cannot be seen any more.
    pub(crate) fn clear(&mut self) {
        self.slot = Slot { token: 0, owner_pid: 0, owner_boot: 0, claiming: false, ..self.slot };
    }

    pub(crate) fn can_claim(&self) -> bool {
        self.claims > 0
    }

    pub(crate) fn lock(&mut self, who: usize) -> bool {
        let free = self.lock.is_none();
        if free {
            self.lock = Some(who);
        }
        free
    }

    pub(crate) fn locked(&self) -> bool {
        self.lock.is_some()
    }

    pub(crate) fn unlock(&mut self, who: usize) {
        if self.lock == Some(who) {
            self.lock = None;
        }
    }

    pub(crate) fn start_watch(&mut self, who: usize) {
        self.peers[who].disturbed = false;
    }

    pub(crate) fn watched_in_peace(&self, who: usize) -> bool {
        !self.peers[who].disturbed
    }

    /// The end of a watch. A peer of the seed that was stopped all the time has lost its slot by its own rule.
    pub(crate) fn end_watch(&mut self, setup: &Setup) {
        let old = self.slot.age == Age::Old;
        for (peer, rule) in self.peers.iter_mut().zip(setup.rules) {
            peer.forfeit |= old && peer.stopped && rule == Some(Rule::Seed) && peer.step.has_slot();
        }
    }

    pub(crate) fn settled(&self, who: usize) -> bool {
        self.watched_in_peace(who) && self.quiet(Some(who))
    }

    pub(crate) fn go(&mut self, who: usize, step: Step) {
        self.peers[who].step = step;
        // What no later step asks for is forgotten, so that worlds which differ in nothing else are one.
        if step == Step::Idle {
            self.peers[who] = fresh(self.peers[who].pid);
        }
        if matches!(step, Step::Prepare | Step::Unlock | Step::SeedStoreBoot) {
            self.peers[who].seen = View::default();
            self.peers[who].disturbed = false;
        }
    }

    pub(crate) fn at(&self, who: usize, step: Step) -> Self {
        let mut world = *self;
        world.go(who, step);
        world
    }

    pub(crate) fn with(&self, who: usize, change: impl FnOnce(&mut Peer)) -> Self {
        let mut world = *self;
        change(&mut world.peers[who]);
        world
    }
}

fn fresh(pid: u8) -> Peer {
    Peer {
        step: Step::Idle,
        stopped: false,
        pid,
        claim: 0,
        seen: View::default(),
        disturbed: false,
        forfeit: false,
        silent: false,
    }
}
