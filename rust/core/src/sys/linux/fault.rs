//! Surviving that somebody cuts the file under a mapping.
//!
//! A load or store past the end of a mapped file raises `SIGBUS`, which ends the process. No check beforehand can
//! prevent that, because the file may be cut between the check and the access. So a fault inside one of our mappings is
//! answered as libwayland-server does for its clients' pools (`wayland-shm.c`, `sigbus_handler`): a page of zeros of
//! this process alone takes the place of the lost one, and the access goes on. The owner of the mapping then finds
//! nothing of its own there and opens the file anew. Any other `SIGBUS` goes on to whoever had the signal before.

use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use super::fork;
use super::table::{Entry, Table};

/// How often our handler is put over one that was installed over it. Each time has a function of its own, so that a
/// handler that calls the one before it reaches an older one of ours, never the same again.
const LAYERS: usize = 4;
const HANDLERS: [Handler; LAYERS] = [on_fault::<0>, on_fault::<1>, on_fault::<2>, on_fault::<3>];

/// The first byte of every guarded page.
static PAGES: Table = Table::new();
static PAGE_SIZE: AtomicUsize = AtomicUsize::new(0);
static LAYERS_USED: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS: [Previous; LAYERS] = [const { Previous::new() }; LAYERS];

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
type PlainHandler = extern "C" fn(libc::c_int);

/// Who had the signal before a layer of ours.
struct Previous {
    handler: AtomicUsize,
    flags: AtomicI32,
}

impl Previous {
    const fn new() -> Self {
        Self { handler: AtomicUsize::new(libc::SIG_DFL), flags: AtomicI32::new(0) }
    }
}

/// A page whose loss does not end the process, until this is dropped.
#[derive(Debug)]
pub(super) struct Guard(Entry);

impl Guard {
    /// Guard the page that begins at address `page`.
    pub(super) fn new(page: usize) -> Self {
        keep_guarding();
        loop {
            if let Some(entry) = PAGES.enter(page) {
                return Self(entry);
            }
            PAGES.grow();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// In a forked child: none of the guarded pages exists there.
pub(super) fn forget_pages() {
    PAGES.drain().for_each(drop);
}

/// Install the handler where it is not: at the first mapping, and again where another one was put over it.
pub(crate) fn keep_guarding() {
    if current().is_none_or(|action| is_ours(&action)) {
        return;
    }
    fork::exclusively(|| {
        let Some(before) = current().filter(|action| !is_ours(action)) else { return };
        let layer = LAYERS_USED.load(Ordering::Relaxed);
        if layer == LAYERS {
            return; // Somebody installs theirs again and again: the signal is theirs.
        }
        LAYERS_USED.store(layer + 1, Ordering::Relaxed);
        // SAFETY: sysconf has no preconditions.
        let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_SIZE.store(usize::try_from(page_size).unwrap_or(4096), Ordering::Relaxed);
        PREVIOUS[layer].flags.store(before.sa_flags, Ordering::Relaxed);
        // Release: pairs with the Acquire in `pass_on`, which then finds the flags that belong to it.
        PREVIOUS[layer].handler.store(before.sa_sigaction, Ordering::Release);
        // NODEFER: a handler that we pass the signal on to may raise it again, or leave by longjmp.
        install(
            HANDLERS[layer] as libc::sighandler_t,
            libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER,
        );
    });
}

fn is_ours(action: &libc::sigaction) -> bool {
    HANDLERS.iter().any(|handler| *handler as libc::sighandler_t == action.sa_sigaction)
}

fn current() -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: the kernel fills `action` when it returns 0; no handler is changed.
    let told = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), action.as_mut_ptr()) };
    // SAFETY: filled by the call above.
    (told == 0).then(|| unsafe { action.assume_init() })
}

fn install(handler: libc::sighandler_t, flags: libc::c_int) {
    // SAFETY: all-zero bytes are a valid `sigaction` with an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    // SAFETY: `action` is complete; its handler is the system's, or lives as long as this library is loaded.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
}

extern "C" fn on_fault<const LAYER: usize>(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the address of this thread's errno is always valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // SAFETY: the kernel hands a complete `siginfo_t` to an SA_SIGINFO handler.
    let code = unsafe { (*info).si_code };
    // Codes of 0 and below are signals that somebody sent: they carry no address.
    // SAFETY: a fault's `siginfo_t` carries the address.
    let mended = code > 0 && mend(unsafe { (*info).si_addr() } as usize);
    if !mended {
        pass_on(&PREVIOUS[LAYER], signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = saved };
}

/// Put a page of zeros under `address`, where one of our mappings lost its own.
fn mend(address: usize) -> bool {
    let size = PAGE_SIZE.load(Ordering::Relaxed);
    let page = address & !(size - 1);
    if page == 0 || !PAGES.contains(page) {
        return false;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the page is a guarded mapping's, which stays mapped for as long as its entry stands in the table, and
    // whose bytes any other process may change at any time: nobody relies on what they were.
    let zeros = unsafe {
        libc::mmap(page as *mut libc::c_void, size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    zeros != libc::MAP_FAILED
}

/// Do what would have happened without us.
fn pass_on(before: &Previous, signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a complete `siginfo_t` to an SA_SIGINFO handler.
    let sent = unsafe { (*info).si_code } <= 0;
    // Acquire: pairs with the Release in `keep_guarding`.
    match before.handler.load(Ordering::Acquire) {
        libc::SIG_IGN if sent => {}
        // A fault is not ignorable: the kernel ends the process then too. On return the access faults again.
        libc::SIG_IGN | libc::SIG_DFL => {
            install(libc::SIG_DFL, 0);
            if sent {
                // SAFETY: raise is safe in a signal handler (signal-safety(7)).
                unsafe { libc::raise(signal) };
            }
        }
        handler if before.flags.load(Ordering::Relaxed) & libc::SA_SIGINFO != 0 => {
            // SAFETY: sigaction(2) told this address as that of a handler with three arguments.
            let handler = unsafe { transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: sigaction(2) told this address as that of a handler with one argument.
            let handler = unsafe { transmute::<usize, PlainHandler>(handler) };
            handler(signal);
        }
    }
}
