//! The alternatives for comparison: bare events and timers, pprof-rs, and `perf record`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use nix::unistd::gettid;
use perf_event::Builder as PerfBuilder;
use perf_event::events::Software;
use pprof::ProfilerGuardBuilder;
use tempfile::TempDir;

use crate::measure::figure;
use crate::sampling::{cpu_of_work, keep_busy};

const PERIOD: Duration = Duration::from_nanos(1_000_000_000 / 999);

/// A perf event that interrupts 999 times per second and records nothing.
pub(crate) fn perf_floor() -> f64 {
    cpu_of_work(|run| {
        let mut event = PerfBuilder::new().kind(Software::CPU_CLOCK);
        event.sample_period(PERIOD.as_nanos() as u64);
        let mut event = event.build().expect("perf events");
        event.enable().expect("perf events");
        run();
    })
}

/// A timer with a signal whose handler does next to nothing.
pub(crate) fn timer_floor() -> f64 {
    cpu_of_work(|run| {
        let seen = Arc::new(AtomicBool::new(false));
        let signal = Signal::SIGUSR1;
        let handler = signal_hook::flag::register(signal as i32, seen).expect("a handler");
        let thread_id = gettid().as_raw();
        let notify = SigevNotify::SigevThreadId { signal, thread_id, si_value: 0 };
        let clock = ClockId::CLOCK_THREAD_CPUTIME_ID;
        let mut timer = Timer::new(clock, SigEvent::new(notify)).expect("a timer");
        let expiration = Expiration::Interval(PERIOD.into());
        timer.set(expiration, TimerSetTimeFlags::empty()).expect("a timer");
        run();
        drop(timer);
        // The handler of signal-hook remains installed, without effect.
        signal_hook::low_level::unregister(handler);
    })
}

/// pprof-rs with the unwinder that needs no frame pointers.
pub(crate) struct Pprof {
    hertz: u32,
    /// Samples taken so far.
    pub(crate) samples: u64,
}

impl Pprof {
    pub(crate) fn new(hertz: u32) -> Self {
        Self { hertz, samples: 0 }
    }

    /// pprof-rs samples the whole process, so no other thread may run in the meantime.
    pub(crate) fn cpu_of_work(&mut self) -> f64 {
        self.sample(|| cpu_of_work(|run| run()))
    }

    fn sample(&mut self, action: impl FnOnce() -> f64) -> f64 {
        let hertz = self.hertz.try_into().expect("a rate");
        let guard = ProfilerGuardBuilder::default().frequency(hertz).build().expect("SIGPROF");
        let result = action();
        let report = guard.report().build_unresolved().expect("a report");
        self.samples += report.data.values().map(|count| count.unsigned_abs() as u64).sum::<u64>();
        result
    }
}

pub(crate) fn delivered_by_pprof() {
    for hertz in [99, 999] {
        let mut pprof = Pprof::new(hertz);
        let cpu_s = pprof.sample(|| keep_busy(2, |run| run()));
        let due = cpu_s * f64::from(hertz);
        let share = pprof.samples as f64 / due * 100.0;
        figure(&format!("sampling.pprof_rs.delivered_{hertz}hz"), share, "%");
    }
}

/// Only the busy work, for [`Recorder`].
pub(crate) fn busy() {
    println!("{}", cpu_of_work(|run| run()));
}

/// Runs `perf record` on a child that does the busy work.
pub(crate) struct Recorder {
    directory: TempDir,
}

impl Recorder {
    /// Returns none, and prints why, if `perf` is not installed or refused.
    pub(crate) fn find() -> Option<Self> {
        let recorder = Self { directory: tempfile::tempdir().expect("a directory") };
        let result = recorder.try_cpu_of_work(Some(99));
        if let Err(why) = &result {
            eprintln!("sampling.perf_record is left out: {why}");
        }
        result.is_ok().then_some(recorder)
    }

    /// CPU time of the child. Without a rate it is not recorded.
    pub(crate) fn cpu_of_work(&self, hertz: Option<u32>) -> f64 {
        self.try_cpu_of_work(hertz).expect("it worked before")
    }

    fn try_cpu_of_work(&self, hertz: Option<u32>) -> Result<f64, String> {
        let this = std::env::current_exe().expect("the path of this program");
        let mut command =
            Command::new(if hertz.is_some() { "perf".as_ref() } else { this.as_os_str() });
        if let Some(hertz) = hertz {
            command.args(["record", "-q", "-B", "-N", "-e", "cpu-clock", "--call-graph", "dwarf"]);
            command.args(["-F", &hertz.to_string(), "-o"]);
            command.arg(self.directory.path().join("perf.data")).arg("--").arg(&this);
        }
        command.args(["--child", "busy"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = command.spawn().map_err(|error| format!("perf: {error}"))?;
        let mut printed = String::new();
        let result = running.stdout.take().map(|out| BufReader::new(out).read_line(&mut printed));
        // perf may sleep for a second after its child has ended.
        _ = running.kill();
        running.wait().map_err(|error| format!("perf: {error}"))?;
        printed.trim().parse().map_err(|_| format!("perf record: {result:?} {printed:?}"))
    }
}
