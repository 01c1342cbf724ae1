//! A discrete-event model of processes that share one card, written after a Python simulator of the project's design
//! phase; here the decisions are the real ones (`Round`, `Grid`, `Roster`, `smooth_step_us`, `turn_limit_us`).
//!
//! A step is a GPU part, for which the card serves nobody else, and a CPU part, for which it may. The card is a FIFO of
//! submitted steps that loses a millisecond when it changes hands. Sleepers oversleep a little, a hand-over takes some
//! tens of microseconds. A peer knows what the registry tells it and its own clock; no decision looks at the card.
//!
//! Everything is in whole microseconds and repeats exactly for one seed.

mod device;
mod invariants;
mod measure;
mod peer;
mod random;
mod turns;
mod windows;
mod workload;
mod world;

pub(crate) use measure::{Outcome, Scenario};
pub(crate) use peer::Kind;
pub(crate) use random::Random;
pub(crate) use workload::Work;
pub(crate) use world::{Fault, Ungated, World};
