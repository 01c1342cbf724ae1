//! What the registry promises to real processes: this test binary runs itself as their program.

mod children;
mod cut;
mod foreign;
mod forks;
mod locks;
mod thief;
