//! Who runs when, and for how long: pure functions of the active peers and the time, in integer arithmetic, so that
//! every peer computes the same schedule bit for bit.

mod grid;
mod shares;
mod turn;

pub(crate) use grid::period_of_window_us;
pub use grid::{Grid, period_us};
pub use shares::{Roster, SHARE_FLOOR_PPM, WEIGHT_MILLI_DEFAULT, weight_milli};
pub use turn::{
    DEBT_MAX_US, Round, TurnPeer, WINDOW_DEFAULT_US, Want, believed_turn_limit_us, longest_step_us,
    smooth_step_us, turn_limit_us,
};

/// Parts per million in a whole.
pub const PPM: u64 = 1_000_000;
