//! Who holds and who waits for a lease, seen from outside and without touching its lock.

use std::fmt;

use super::LeaseMode;
use super::files::{Look, Spot};
use super::hint::{Claimed, Hint};
use super::record::Record;
use crate::error::Result;
use crate::json::Object;
use crate::sys::{self, LockLine};

/// A process that holds or waits; what is not known is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseParty {
    /// Process id in this pid namespace.
    pub pid: Option<u32>,
    /// Command name, as the kernel or the process itself says.
    pub name: Option<String>,
    /// Why it wanted the lease, in its own words.
    pub reason: Option<String>,
    /// How it holds or wants the lease.
    pub mode: Option<LeaseMode>,
    /// Wall clock of the acquisition or the begin of the wait, in microseconds since the epoch.
    pub since_us: Option<i64>,
}

impl fmt::Display for LeaseParty {
    /// Text from other processes is escaped: it may hold anything.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid {pid}")?,
            None => f.write_str("an unknown process")?,
        }
        if let Some(name) = &self.name {
            write!(f, " ({name:?})")?;
        }
        match &self.reason {
            Some(reason) => write!(f, ", reason {reason:?}"),
            None => Ok(()),
        }
    }
}

/// One look at a lease. `held` and `mode` are what the kernel says; names, reasons and waiters are hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseStatus {
    /// Whether anybody has it.
    pub held: bool,
    /// How it is held.
    pub mode: Option<LeaseMode>,
    /// Those who have it, as far as they can be known: empty is possible while `held`.
    pub holders: Vec<LeaseParty>,
    /// Those who wait for it, first come first; then other programs as far as `/proc/locks` shows them.
    pub waiters: Vec<LeaseParty>,
}

impl LeaseStatus {
    /// One JSON object: `held`, `mode`, `holders`, `waiters`, each party with all of its fields.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut object = Object::new();
        object.boolean("held", self.held);
        optional(&mut object, "mode", self.mode.map(LeaseMode::as_str));
        object.array("holders", self.holders.iter().map(|party| |object: &mut Object| party.write(object)));
        object.array("waiters", self.waiters.iter().map(|party| |object: &mut Object| party.write(object)));
        object.end()
    }
}

impl LeaseParty {
    fn write(&self, object: &mut Object) {
        object.raw("pid", &number(self.pid));
        optional(object, "name", self.name.as_deref());
        optional(object, "reason", self.reason.as_deref());
        optional(object, "mode", self.mode.map(LeaseMode::as_str));
        object.raw("since_us", &number(self.since_us));
    }
}

fn optional(object: &mut Object, key: &str, value: Option<&str>) {
    match value {
        Some(text) => object.text(key, text),
        None => object.raw(key, "null"),
    }
}

fn number(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}

/// Look at the lease of `spot`.
pub(super) fn look(spot: &Spot) -> Result<LeaseStatus> {
    let look = Look::at(spot)?;
    let lines = look.identity.map(sys::file_lock_lines).unwrap_or_default();
    let namespace = sys::process_identity().pid_namespace;
    Ok(judge(&look, &lines, namespace))
}

/// One who holds the lease, for somebody who was refused: where its files say so; else as far as the system tells, which
/// takes it some milliseconds; else whoever wrote a bare pid there, as gpulease does.
pub(super) fn holder(spot: &Spot) -> Option<LeaseParty> {
    let (files, namespace) = (Look::at(spot).ok()?, sys::process_identity().pid_namespace);
    let first = |status: LeaseStatus| status.holders.into_iter().next();
    let foreign = || Some(&files.record).filter(|record| record.mode.is_none());
    first(judge(&files, &[], namespace))
        .or_else(|| look(spot).ok().and_then(first))
        .or_else(|| recorded(foreign()?, LeaseMode::Exclusive, namespace))
}

/// The sleepers that have no place in our queue. Its head sleeps in the lock as well, under a number that may be another
/// one in our pid namespace.
fn outside(mut lines: Vec<LockLine>, hints: &[Hint]) -> Vec<LockLine> {
    let head = hints.iter().find(|hint| hint.waits());
    let unseen = head.is_some_and(|head| lines.iter().all(|line| line.pid != head.author.pid));
    lines.retain(|line| !wants(hints, line.pid));
    if unseen && !lines.is_empty() {
        lines.remove(0);
    }
    lines
}

fn judge(look: &Look, lines: &[LockLine], namespace: u64) -> LeaseStatus {
    let (waiting, holding): (Vec<LockLine>, Vec<LockLine>) =
        lines.iter().copied().partition(|line| line.waiting);
    let mode = look.state.or_else(|| holding.first().map(|line| line.mode.into()));
    let mut holders: Vec<LeaseParty> =
        holding.iter().filter(|line| sys::process_exists(line.pid)).copied().map(from_line).collect();
    let nameless = holders.is_empty() || holders.len() < holding.len();
    if mode == Some(LeaseMode::Shared) {
        holders = shared_holders(look, holders, namespace);
    } else if let Some(recorded) = mode.and_then(|mode| recorded(&look.record, mode, namespace)) {
        // `ocgpu run` took the lock, the command that it runs is the one to name.
        let locker = look.record.lock_pid.or(look.record.pid);
        match holders.iter_mut().find(|holder| holder.pid == locker) {
            Some(holder) => *holder = recorded,
            // A lock without a living owner in sight is one that a child inherited, or one of another namespace.
            None if nameless => holders.push(recorded),
            None => {}
        }
    }
    let ours = look.hints.iter().filter(|hint| hint.waits());
    let strangers = outside(waiting, &look.hints).into_iter();
    let waiters = ours.map(|hint| from_hint(hint, namespace)).chain(strangers.map(from_line)).collect();
    LeaseStatus { held: mode.is_some(), mode, holders, waiters }
}

/// Those who say so, with what the record adds to one of them; then those that only the system shows.
fn shared_holders(look: &Look, lines: Vec<LeaseParty>, namespace: u64) -> Vec<LeaseParty> {
    let says = |hint: &&Hint| hint.claimed == Claimed::Held(LeaseMode::Shared);
    let mut holders: Vec<LeaseParty> =
        look.hints.iter().filter(says).map(|hint| from_hint(hint, namespace)).collect();
    if let Some(recorded) = recorded(&look.record, LeaseMode::Shared, namespace) {
        let unseen = holders.is_empty() && lines.iter().all(|line| line.pid != look.record.lock_pid);
        match holders.iter_mut().find(|holder| holder.pid == recorded.pid) {
            Some(holder) => *holder = recorded,
            None if unseen => holders.push(recorded),
            None => {}
        }
    }
    let lockers: Vec<u64> = look.hints.iter().filter(says).map(|hint| hint.ticket).collect();
    for line in lines {
        let locks = line.pid.is_some_and(|pid| lockers.contains(&u64::from(pid)));
        if !locks && holders.iter().all(|holder| holder.pid != line.pid) {
            holders.push(line);
        }
    }
    holders
}

fn wants(hints: &[Hint], pid: u32) -> bool {
    hints.iter().any(|hint| hint.author.pid == pid && hint.waits())
}

fn from_hint(hint: &Hint, namespace: u64) -> LeaseParty {
    let (Claimed::Held(mode) | Claimed::Wanted(mode)) = hint.claimed;
    LeaseParty {
        // A number from another pid namespace would name a stranger here.
        pid: Some(hint.author.pid).filter(|_| hint.author.is_of(namespace)),
        name: Some(hint.author.name()),
        reason: None,
        mode: Some(mode),
        since_us: Some(hint.since_us),
    }
}

/// The record's holder, if it can be the present one: a record of another mode is a former holder's.
fn recorded(record: &Record, mode: LeaseMode, namespace: u64) -> Option<LeaseParty> {
    if record.pid.is_none() || record.mode.is_some_and(|recorded| recorded != mode) {
        return None;
    }
    // A number from another pid namespace would name a stranger here.
    let local = record.pid_namespace.is_none_or(|recorded| recorded == namespace);
    Some(LeaseParty {
        pid: record.pid.filter(|_| local),
        name: record.name.clone(),
        reason: record.reason.clone(),
        mode: Some(mode),
        since_us: record.since_us,
    })
}

fn from_line(line: LockLine) -> LeaseParty {
    LeaseParty {
        pid: Some(line.pid),
        name: sys::command_name(line.pid),
        reason: None,
        mode: Some(line.mode.into()),
        since_us: None,
    }
}
