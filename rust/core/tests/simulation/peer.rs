//! A process: its words in the registry, what it keeps to itself, and what is measured of it.

use ocgpu_core::schedule::Want;

use super::Work;
use super::world::Event;

/// How a process takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Takes turns, unless somebody active wants the grid.
    Turn,
    /// Ours, and wants the grid: idle at once when a request ends.
    Grid,
    /// Knows only the seed's fields and rules: idle two seconds after its last step.
    Seed,
    /// Never waits.
    Ungated,
}

/// What other processes can read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words {
    pub(crate) weight_milli: u32,
    pub(crate) active: bool,
    pub(crate) heartbeat_us: i64,
    pub(crate) beats: u64,
    pub(crate) in_request: bool,
    pub(crate) want: Want,
    pub(crate) progress: u32,
    pub(crate) v_us: i64,
    pub(crate) step_us: u32,
    pub(crate) turn_limit_us: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Stopped,
    Dead,
}

/// Where its inference thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Position {
    /// In a CPU part.
    Cpu,
    /// Without a request.
    Thinking,
    /// Before the gate, since then; whether it has been told to wait.
    Gate { since_us: u64, waits: bool },
    /// Between begin and end of a step.
    Step,
}

/// What a waiter last saw of the token and its holder, and since when.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    pub(crate) what: (u64, u32),
    pub(crate) since_us: u64,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) kind: Kind,
    pub(crate) words: Words,
    pub(crate) state: State,
    pub(crate) position: Position,
    pub(crate) work: Work,
    pub(crate) gpu_us: u64,
    pub(crate) cpu_us: Option<u64>,
    /// Outdates the sleeps that a wake-up has overtaken.
    pub(crate) attempt: u64,
    /// What happened to it while it was stopped.
    pub(crate) deferred: Vec<Event>,
    pub(crate) turn: Private,
    pub(crate) tally: Tally,
}

/// What turn mode keeps outside the registry. Times of other peers' words are those at which they changed.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each tells one fact of the past")]
pub(crate) struct Private {
    pub(crate) beat_at_us: u64,
    pub(crate) progress_at_us: u64,
    pub(crate) died_us: u64,
    /// Its turn was taken while it was in a step.
    pub(crate) stolen: bool,
    pub(crate) last_activity_us: Option<u64>,
    pub(crate) begun_us: u64,
    pub(crate) longest_us: u32,
    /// It was in a round before.
    pub(crate) entered: bool,
    pub(crate) charged_until_us: u64,
    pub(crate) used_us: u64,
    pub(crate) generation: u64,
    pub(crate) boosted: bool,
    /// It took the turn that it has from another.
    pub(crate) stole: bool,
    /// The running step began while one whose turn was taken might still run.
    pub(crate) beside: bool,
    pub(crate) ran_on_grid: bool,
    pub(crate) seen: Seen,
    /// By slot: the words at which I gave up on it.
    pub(crate) suspects: Vec<Option<(u64, u32)>>,
}

/// What is measured.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "the postfix is the unit")]
pub(crate) struct Tally {
    /// Progress, in what it would have taken alone.
    pub(crate) alone_us: u64,
    /// Times at which steps ended.
    pub(crate) ends_us: Vec<u64>,
    /// Between two ends in one request.
    pub(crate) gaps_us: Vec<u64>,
    /// From a request to its first token.
    pub(crate) first_us: Vec<u64>,
    pub(crate) requested_us: u64,
    pub(crate) previous_us: Option<u64>,
    pub(crate) waited_us: u64,
    pub(crate) longest_wait_us: u64,
}

impl Peer {
    pub(crate) fn new(kind: Kind, weight: u32, work: Work, peers: usize) -> Self {
        let words = Words {
            weight_milli: weight * 1000,
            active: false,
            heartbeat_us: 0,
            beats: 0,
            in_request: false,
            want: Want::Nothing,
            progress: 0,
            v_us: 0,
            step_us: 0,
            turn_limit_us: 0,
        };
        Self {
            kind,
            words,
            state: State::Running,
            position: Position::Thinking,
            work,
            gpu_us: 0,
            cpu_us: None,
            attempt: 0,
            deferred: Vec::new(),
            turn: Private { suspects: vec![None; peers], ..Private::default() },
            tally: Tally::default(),
        }
    }

    /// Held back at the gate by the schedule.
    pub(crate) fn waits(&self) -> bool {
        self.state != State::Dead && matches!(self.position, Position::Gate { waits: true, .. })
    }

    pub(crate) fn takes_turns(&self) -> bool {
        self.kind == Kind::Turn
    }
}
