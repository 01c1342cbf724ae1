//! The few system calls that the standard library lacks: epoll, a timer, accept without a second call, reset.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const BACKLOG: i32 = 4096;
const EVENTS: usize = 512;

/// Waits for any of many descriptors to be readable; each is its own token.
pub(crate) struct Poll {
    epoll: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointer is passed.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        Ok(Self { epoll, events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS] })
    }

    pub(crate) fn add(&self, source: &impl AsRawFd) -> io::Result<()> {
        let fd = source.as_raw_fd();
        let interest = (libc::EPOLLIN | libc::EPOLLRDHUP).cast_unsigned();
        let mut event = libc::epoll_event { events: interest, u64: u64::try_from(fd).unwrap_or_default() };
        // SAFETY: `event` lives across the call, which copies it.
        check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })
    }

    /// Put the tokens of what is readable into `ready`; none after `timeout_ms`, -1 being for ever.
    pub(crate) fn wait(&mut self, ready: &mut Vec<usize>, timeout_ms: i32) -> io::Result<()> {
        ready.clear();
        let room = i32::try_from(self.events.len()).unwrap_or(i32::MAX);
        // SAFETY: `events` has room for `room` entries.
        let count =
            unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), self.events.as_mut_ptr(), room, timeout_ms) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        let count = usize::try_from(count).unwrap_or_default();
        ready.extend(self.events[..count].iter().map(|event| usize::try_from(event.u64).unwrap_or_default()));
        Ok(())
    }
}

/// Becomes readable at a moment of the monotonic clock.
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no pointer is passed.
        Ok(Self(owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) })?))
    }

    /// Set the moment, which also makes it unreadable until then; 0 is never.
    pub(crate) fn set(&self, at_ns: u64) -> io::Result<()> {
        // SAFETY: all bits zero are an `itimerspec`.
        let mut moment: libc::itimerspec = unsafe { zeroed() };
        moment.it_value.tv_sec = i64::try_from(at_ns / 1_000_000_000).unwrap_or(i64::MAX);
        moment.it_value.tv_nsec = i64::try_from(at_ns % 1_000_000_000).unwrap_or_default();
        let fd = self.0.as_raw_fd();
        let old = std::ptr::null_mut();
        // SAFETY: `moment` lives across the call, and the old value is not asked for.
        check(unsafe { libc::timerfd_settime(fd, libc::TFD_TIMER_ABSTIME, &raw const moment, old) })
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Listen on a port of the kernel's choice; what is accepted does not delay small packets.
pub(crate) fn listen() -> io::Result<TcpListener> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let on: i32 = 1;
    set(&listener, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on)?;
    // SAFETY: no pointer is passed; a second `listen` only sets the backlog.
    check(unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) })?;
    Ok(listener)
}

/// Accept a connection that is non-blocking from the start.
pub(crate) fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let (address, length) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the peer's address is not asked for.
    let fd = unsafe { libc::accept4(listener.as_raw_fd(), address, length, flags) };
    Ok(TcpStream::from(owned(fd)?))
}

/// Connect to a port of this machine.
pub(crate) fn connect(port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Close with a reset.
pub(crate) fn reset(stream: TcpStream) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let done = set(&stream, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    drop(stream);
    done
}

fn set<T>(socket: &impl AsRawFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of::<T>()).unwrap_or_default();
    // SAFETY: `value` is live and `size` bytes long; the call copies it.
    check(unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), size)
    })
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(status: i32) -> io::Result<()> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
