//! One slot as its bytes are, and who may be in which step of what.

/// What a reader makes of a heartbeat's age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Age {
    Young,
    /// Older than the seed's limit.
    Old,
}

/// The bytes. 0 is nobody, no claim, no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub(crate) pid: u8,
    /// Number of the claim that last wrote its start.
    pub(crate) boot: u8,
    pub(crate) age: Age,
    pub(crate) token: u8,
    pub(crate) owner_pid: u8,
    pub(crate) owner_boot: u8,
    pub(crate) claiming: bool,
}

/// What a reader remembers of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct View {
    pub(crate) pid: u8,
    pub(crate) boot: u8,
    pub(crate) token: u8,
    pub(crate) claiming: bool,
    pub(crate) old: bool,
}

impl Slot {
    /// Whether the extension names the owner that a reader has read.
    pub(crate) fn names(self, pid: u8, boot: u8) -> bool {
        self.token != 0 && self.owner_pid == pid && (self.claiming || self.owner_boot == boot)
    }

    pub(crate) fn view(self) -> View {
        let token = if self.names(self.pid, self.boot) { self.token } else { 0 };
        View {
            pid: self.pid,
            boot: self.boot,
            token,
            claiming: token != 0 && self.claiming,
            old: self.age == Age::Old,
        }
    }
}

/// Which rule a peer follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// Ours: with the kernel's lock.
    Lock,
    /// The seed's: compare-and-swap and a heartbeat.
    Seed,
}

/// The next step of a peer. Each is one atomic access, or a run of them that nobody else can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// Does nothing with this slot. A peer with a lock may begin a claim or a look from here.
    Idle,
    Crashed,

    // A claim of ours, the slot's lock held: read the slot, free it when its owner is dead, take it.
    ReadPid,
    ReadOwner,
    ReadAgain,
    VacateSwap,
    VacateClear,
    Prepare,
    StoreToken,
    StoreHeartbeat,
    Swap,
    Withdraw,
    StoreBoot,
    Complete,
    /// Ours, and beating.
    Own,
    // A beat or a release: is it still ours?
    CheckPid {
        release: bool,
    },
    CheckRest {
        release: bool,
    },
    Beat,
    ReleaseSwap,
    ReleaseClear,
    /// Robbed: take our name out and let go.
    Lost,
    Unlock,

    // A look at somebody else's slot, without its lock until it may be freed.
    Watch,
    LockToFree,
    CompareAgain,
    FreeSwap,
    FreeClear,

    // The seed's claim.
    SeedReadHeartbeat,
    SeedSwap,
    SeedStoreBoot,
    SeedStoreHeartbeat,
    SeedOwn,
}

impl Step {
    /// Steps that a running peer leaves within moments, whatever it waits for.
    pub(crate) fn passes(self) -> bool {
        !matches!(self, Self::Idle | Self::Crashed | Self::Watch)
    }

    /// Steps of a look, which touch nothing that somebody else's look would take for a sign of life.
    pub(crate) fn looks(self) -> bool {
        matches!(self, Self::Watch | Self::LockToFree | Self::CompareAgain | Self::FreeSwap | Self::FreeClear)
    }

    /// Steps between the swap that takes the slot and the one that gives it back.
    pub(crate) fn has_slot(self) -> bool {
        matches!(
            self,
            Self::StoreBoot
                | Self::Complete
                | Self::Own
                | Self::CheckPid { .. }
                | Self::CheckRest { .. }
                | Self::Beat
                | Self::ReleaseSwap
                | Self::Lost
                | Self::SeedStoreBoot
                | Self::SeedStoreHeartbeat
                | Self::SeedOwn
        )
    }
}
