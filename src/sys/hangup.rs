//! The signal SIGHUP.

use std::io;

#[cfg(unix)]
pub(crate) use unix::{EndHangups, Hangups};
#[cfg(not(unix))]
pub(crate) use without::{EndHangups, Hangups};

#[cfg(unix)]
mod unix {
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::process;

    use signal_hook::SigId;
    use signal_hook::consts::SIGHUP;
    use signal_hook::low_level::{pipe, unregister};

    use super::super::platform;
    use super::io;

    /// Waits for SIGHUP. Previously installed handlers are still called.
    #[derive(Debug)]
    pub(crate) struct Hangups(UnixStream);

    /// Ends the wait when dropped. The signal handler stays installed but no longer does anything for this crate.
    #[derive(Debug)]
    pub(crate) struct EndHangups {
        id: SigId,
        socket: UnixStream,
        made_in: u32,
    }

    impl Hangups {
        pub(crate) fn new() -> io::Result<(Self, EndHangups)> {
            platform::keep_loaded();
            let (read, write) = UnixStream::pair()?;
            let socket = read.try_clone()?;
            let id = pipe::register(SIGHUP, write)?;
            Ok((Self(read), EndHangups { id, socket, made_in: process::id() }))
        }

        /// Waits for SIGHUP. Returns false at the end.
        pub(crate) fn wait(&mut self) -> bool {
            // Several signals at once count as one.
            let mut bytes = [0; 64];
            loop {
                match self.0.read(&mut bytes) {
                    Ok(0) => return false,
                    Ok(_) => return true,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // The program has closed files that it does not own.
                    Err(_) => return false,
                }
            }
        }
    }

    impl Drop for EndHangups {
        fn drop(&mut self) {
            // In a forked child the socket is the parent's.
            if self.made_in == process::id() {
                unregister(self.id);
                _ = self.socket.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Systems without this signal.
#[cfg(not(unix))]
mod without {
    use super::io;

    #[derive(Debug)]
    pub(crate) struct Hangups;

    #[derive(Debug)]
    pub(crate) struct EndHangups;

    impl Hangups {
        pub(crate) fn new() -> io::Result<(Self, EndHangups)> {
            Ok((Self, EndHangups))
        }

        pub(crate) fn wait(&mut self) -> bool {
            false
        }
    }
}
