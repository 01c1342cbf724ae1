//! What one of our peers does with the slot, in the order of `registry/claim.rs` and `registry/liveness.rs`.

use crate::slot::{Age, Step};
use crate::world::{Setup, World, Worlds};

impl World {
    pub(crate) fn lock_steps(&self, who: usize, setup: &Setup, worlds: &mut Worlds) {
        match self.peers[who].step {
            Step::Idle => {
                self.begin(who, worlds);
                self.look(who, setup.settle, worlds);
            }
            Step::Watch | Step::LockToFree | Step::CompareAgain | Step::FreeSwap | Step::FreeClear => {
                self.free_step(who, setup, worlds);
            }
            Step::Own
            | Step::CheckPid { .. }
            | Step::CheckRest { .. }
            | Step::Beat
            | Step::ReleaseSwap
            | Step::ReleaseClear
            | Step::Lost => self.own_step(who, worlds),
            _ => self.claim_step(who, worlds),
        }
    }

    fn begin(&self, who: usize, worlds: &mut Worlds) {
        if !self.can_claim() || self.locked() {
            return;
        }
        let mut world = self.begin_claim(who);
        world.lock(who);
        world.go(who, Step::ReadPid);
        worlds.push((world, who, "locks"));
    }

    /// A sweep comes by.
    fn look(&self, who: usize, settle: bool, worlds: &mut Worlds) {
        let view = self.slot.view();
        let dead = view.token != 0 && !self.locked();
        let silent = view.token == 0 && view.old;
        if view.pid == 0 || !(dead || silent) {
            return;
        }
        let at_once = dead && !view.claiming;
        let mut world = self.at(who, if at_once || !settle { Step::LockToFree } else { Step::Watch });
        world.peers[who].seen = view;
        world.start_watch(who);
        worlds.push((world, who, "looks"));
    }

    fn free_step(&self, who: usize, setup: &Setup, worlds: &mut Worlds) {
        let (mut world, seen) = (*self, self.peers[who].seen);
        match self.peers[who].step {
            Step::Watch if !self.watched_in_peace(who) => world.go(who, Step::Idle),
            Step::Watch if self.settled(who) => {
                world.end_watch(setup);
                world.go(who, Step::LockToFree);
            }
            Step::Watch => return,
            Step::LockToFree => {
                let next = if world.lock(who) { Step::CompareAgain } else { Step::Idle };
                world.go(who, next);
            }
            Step::CompareAgain => {
                let now = self.slot.view();
                let same = (now.pid, now.boot, now.token, now.claiming)
                    == (seen.pid, seen.boot, seen.token, seen.claiming);
                world.go(who, if same && self.watched_in_peace(who) { Step::FreeSwap } else { Step::Unlock });
            }
            Step::FreeSwap => {
                world.free(who, seen.pid);
                world.go(who, Step::FreeClear);
            }
            _ => {
                world.clear();
                world.go(who, Step::Unlock);
            }
        }
        worlds.push((world, who, ""));
    }

    fn claim_step(&self, who: usize, worlds: &mut Worlds) {
        let (mut world, peer) = (*self, self.peers[who]);
        let next = match peer.step {
            Step::ReadPid => {
                world.peers[who].seen.pid = self.slot.pid;
                if self.slot.pid == 0 { Step::Prepare } else { Step::ReadOwner }
            }
            Step::ReadOwner => {
                let named = self.slot.names(peer.seen.pid, self.slot.boot);
                let seen = &mut world.peers[who].seen;
                seen.boot = self.slot.boot;
                seen.token = if named { self.slot.token } else { 0 };
                seen.claiming = named && self.slot.claiming;
                Step::ReadAgain
            }
            Step::ReadAgain => return self.read_again(who, worlds),
            Step::VacateSwap => {
                if world.free(who, peer.seen.pid) {
                    Step::VacateClear
                } else {
                    Step::Withdraw
                }
            }
            Step::VacateClear => {
                world.clear();
                Step::Prepare
            }
            Step::Prepare => {
                world.clear();
                world.slot.owner_pid = peer.pid;
                world.slot.owner_boot = peer.claim;
                world.slot.claiming = true;
                Step::StoreToken
            }
            Step::StoreToken => {
                world.slot.token = peer.claim;
                Step::StoreHeartbeat
            }
            Step::StoreHeartbeat => {
                world.store(who, |slot| slot.age = Age::Young);
                Step::Swap
            }
            Step::Swap => {
                if world.swap(who, 0, peer.pid) {
                    Step::StoreBoot
                } else {
                    Step::Withdraw
                }
            }
            Step::StoreBoot => {
                world.store(who, |slot| slot.boot = peer.claim);
                Step::Complete
            }
            Step::Complete => {
                world.slot.claiming = false;
                Step::Own
            }
            Step::Withdraw => {
                world.clear();
                Step::Unlock
            }
            _ => {
                world.unlock(who);
                Step::Idle
            }
        };
        world.go(who, next);
        worlds.push((world, who, ""));
    }

    /// The end of a reading: it counts when nothing moved; else it is repeated, and at last given up, which leaves the
    /// decision to the swap.
    fn read_again(&self, who: usize, worlds: &mut Worlds) {
        let seen = self.peers[who].seen;
        let same = self.slot.pid == seen.pid && self.slot.boot == seen.boot;
        if !same {
            worlds.push((self.at(who, Step::ReadPid), who, "once more"));
            worlds.push((self.at(who, Step::Prepare), who, "gives up"));
            return;
        }
        let died = seen.token != 0 && !seen.claiming;
        worlds.push((self.at(who, if died { Step::VacateSwap } else { Step::Unlock }), who, ""));
    }

    fn own_step(&self, who: usize, worlds: &mut Worlds) {
        let (mut world, peer) = (*self, self.peers[who]);
        let next = match peer.step {
            Step::Own => {
                worlds.push((self.at(who, Step::CheckPid { release: true }), who, "begins to leave"));
                Step::CheckPid { release: false }
            }
            Step::CheckPid { release } => {
                if self.slot.pid == peer.pid {
                    Step::CheckRest { release }
                } else {
                    Step::Lost
                }
            }
            Step::CheckRest { release } => {
                let ours = self.slot.boot == peer.claim && self.slot.token == peer.claim;
                match (ours, release) {
                    (true, true) => Step::ReleaseSwap,
                    (true, false) => Step::Beat,
                    _ => Step::Lost,
                }
            }
            Step::Beat => {
                world.store(who, |slot| slot.age = Age::Young);
                Step::Own
            }
            Step::ReleaseSwap => {
                world.free(who, peer.pid);
                Step::ReleaseClear
            }
            Step::Lost if self.slot.token != peer.claim => Step::Unlock,
            _ => {
                world.clear();
                Step::Unlock
            }
        };
        world.go(who, next);
        worlds.push((world, who, ""));
    }
}
