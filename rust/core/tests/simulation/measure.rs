//! What a run is judged by.

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{DEBT_MAX_US, PPM, Roster, Round, TurnPeer};

use super::peer::Tally;
use super::{Kind, Ungated, Work, World};

/// Processes with their weights; the works repeat.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) weights: Vec<u32>,
    pub(crate) works: Vec<Work>,
}

/// A run in figures; parts per million of what is named.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// The largest relative distance of a share from its target.
    pub(crate) error_ppm: u64,
    /// Progress of all, of what one alone would have made.
    pub(crate) aggregate_ppm: u64,
    /// Time in which the card idled while somebody was held back.
    pub(crate) wasted_ppm: u64,
    pub(crate) shares_ppm: Vec<u64>,
    pub(crate) p50_us: u64,
    pub(crate) p95_us: u64,
    pub(crate) longest_gap_us: u64,
    pub(crate) longest_wait_us: u64,
    pub(crate) first_p95_us: u64,
    pub(crate) steals: u32,
}

impl Scenario {
    pub(crate) fn new(name: &'static str, weights: &[u32], works: &[Work]) -> Self {
        Self { name, weights: weights.to_vec(), works: works.to_vec() }
    }

    /// The processes, all of one kind.
    pub(crate) fn world(&self, kind: Kind, seed: u64, warm_us: u64) -> World {
        self.mixed_world(&[kind], seed, warm_us)
    }

    /// The processes; the kinds repeat.
    pub(crate) fn mixed_world(&self, kinds: &[Kind], seed: u64, warm_us: u64) -> World {
        let peers: Vec<_> = (self.weights.iter().enumerate())
            .map(|(slot, weight)| (kinds[slot % kinds.len()], *weight, self.works[slot % self.works.len()]))
            .collect();
        World::new(&peers, seed, warm_us)
    }

    /// Run for so many seconds after three of warming up.
    pub(crate) fn run(&self, kinds: &[Kind], ungated: Ungated, seed: u64, seconds: u64) -> Outcome {
        let mut world = self.mixed_world(kinds, seed, 3_000_000);
        world.ungated = ungated;
        world.run_until((3 + seconds) * 1_000_000);
        self.outcome(&world)
    }

    pub(crate) fn targets_ppm(&self) -> [u32; SLOT_COUNT] {
        let mut roster = Roster::default();
        for (slot, weight) in self.weights.iter().enumerate() {
            roster.insert(slot, weight * 1000);
        }
        roster.shares_ppm()
    }

    /// The longest wait that turn mode promises: 1.25 natural rounds and two of the longest step.
    pub(crate) fn wait_bound_us(&self, steps_us: &[u64]) -> u64 {
        let mut members = [None; SLOT_COUNT];
        for (slot, weight) in self.weights.iter().enumerate() {
            let longest_us = u32::try_from(steps_us[slot % steps_us.len()]).expect("a short step");
            members[slot] =
                Some(TurnPeer { weight_milli: weight * 1000, step_us: longest_us, ..TurnPeer::default() });
        }
        let longest = steps_us.iter().max().expect("a step");
        Round::new(&members).round_us() * 5 / 4 + 2 * longest
    }

    fn outcome(&self, world: &World) -> Outcome {
        let span_us = world.now_us - world.warm_us;
        let tallies: Vec<&Tally> = world.peers.iter().map(|peer| &peer.tally).collect();
        let total_us = tallies.iter().map(|tally| tally.alone_us).sum::<u64>().max(1);
        let shares_ppm: Vec<u64> = tallies.iter().map(|tally| tally.alone_us * PPM / total_us).collect();
        let targets = self.targets_ppm();
        let errors = shares_ppm
            .iter()
            .zip(targets)
            .map(|(share, target)| share.abs_diff(u64::from(target)) * PPM / u64::from(target));
        let worst = |of: fn(&Tally) -> u64| tallies.iter().map(|tally| of(tally)).max().unwrap_or(0);
        Outcome {
            error_ppm: errors.max().unwrap_or(0),
            aggregate_ppm: total_us * PPM / span_us,
            wasted_ppm: world.wasted_us * PPM / span_us,
            p50_us: worst(|tally| percentile(&tally.gaps_us, 50)),
            p95_us: worst(|tally| percentile(&tally.gaps_us, 95)),
            longest_gap_us: worst(|tally| percentile(&tally.gaps_us, 100)),
            longest_wait_us: worst(|tally| tally.longest_wait_us),
            first_p95_us: worst(|tally| percentile(&tally.first_us, 95)),
            shares_ppm,
            steals: world.steals,
        }
    }
}

impl Outcome {
    /// Whether every share is as near to its target as the bounded debt and one step allow.
    pub(crate) fn service_within(&self, scenario: &Scenario, steps_us: &[u64], seconds: u64) -> bool {
        let targets = scenario.targets_ppm();
        let shares = self.shares_ppm.iter().zip(targets).enumerate();
        shares.into_iter().all(|(slot, (share, target))| {
            let once_us = steps_us[slot % steps_us.len()] * PPM / u64::from(target);
            share.abs_diff(u64::from(target)) * seconds <= DEBT_MAX_US.cast_unsigned() + once_us
        })
    }
}

impl Tally {
    /// A step ended that takes `alone_us` without company.
    pub(crate) fn count(&mut self, now_us: u64, warm_us: u64, alone_us: u64) {
        if now_us > warm_us {
            self.alone_us += alone_us;
            match self.previous_us {
                Some(previous_us) => self.gaps_us.push(now_us - previous_us),
                None => self.first_us.push(now_us - self.requested_us),
            }
        }
        self.previous_us = Some(now_us);
        self.ends_us.push(now_us);
    }
}

fn percentile(of: &[u64], percent: usize) -> u64 {
    let mut sorted = of.to_vec();
    sorted.sort_unstable();
    let last = sorted.len().saturating_sub(1);
    sorted.get((sorted.len() * percent / 100).min(last)).copied().unwrap_or(0)
}
