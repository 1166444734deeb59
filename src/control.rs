//! Starts a layer's threads and replaces its rules at run time.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::channel;
use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;

use crate::config::{Builder, start};
use crate::engine::{Engine, Gate};
use crate::error::Error;
use crate::keep::{OwnDispatch, Rules};
use crate::log::{LogEvent, LogKind};
use crate::otel::UnreachedSpans;
use crate::publish::ShutdownResult;
use crate::refresh::refresh_interest;
use crate::sys;
use crate::text::line_of;

/// How long new rules wait until all callsites of the program know them.
const LONGEST_REFRESH: Duration = Duration::from_secs(1);

/// The state that a layer and its handles share, even if nothing runs.
///
/// A layer that is built with rules that keep nothing starts no threads until it gets other rules.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Control {
    /// What each hook reads is first.
    pub(crate) gate: &'static Gate,
    engine: OnceLock<Arc<Engine>>,
    pub(crate) unreached: Arc<UnreachedSpans>,
    /// The fork generation in which it was built. In the child of a fork, its locks may be held forever.
    made_in: u32,
    /// For handles that outlive the layer. Empty if nothing was ever started.
    pub(crate) ending: Arc<OnceLock<Arc<ShutdownResult>>>,
    switch: Mutex<Switch>,
    /// Until there is an engine. Apart, since a start holds `switch`, and runs code of the program.
    early_warnings: Mutex<Vec<LogEvent>>,
    /// The subscriber that the layer is part of, once it is known.
    dispatch: OwnDispatch,
    /// The directory in which profiles can be found, if they are written to files.
    pub(crate) dir: Option<PathBuf>,
}

#[derive(Debug)]
struct Switch {
    /// The engine is built from this.
    builder: Option<Builder>,
    /// The rules in force. While profiling is disabled, those that will be.
    rules: Rules,
    failed: Option<Error>,
    is_disabled: bool,
}

impl Control {
    /// Starts what the builder's rules need.
    ///
    /// # Errors
    ///
    /// If the system refuses to start a thread.
    pub(crate) fn new(builder: Builder) -> Result<Arc<Self>, Error> {
        // Before any lock that a child process could find held.
        Engine::disable_in_children();
        let (rules, has_malformed) = (builder.rules.clone(), builder.has_malformed());
        let dir = builder.dir();
        let control = Arc::new(Self {
            gate: Gate::new(),
            unreached: Arc::default(),
            engine: OnceLock::new(),
            made_in: sys::Forks::generation(),
            ending: Arc::default(),
            switch: Mutex::new(Switch {
                builder: Some(builder),
                rules: rules.clone(),
                failed: None,
                is_disabled: false,
            }),
            early_warnings: Mutex::default(),
            dispatch: Arc::default(),
            dir,
        });
        let switch = &mut control.switch.lock();
        if has_malformed && rules.is_off() {
            // For the threads that say why it is off.
            control.install_rules(switch, Rules::default())?;
        }
        control.install_rules(switch, rules)?;
        Ok(Arc::clone(&control))
    }

    /// For an engine whose threads are simulated by a test.
    #[cfg(test)]
    pub(crate) fn of_engine(engine: Arc<Engine>) -> Arc<Self> {
        let (builder, rules) = (None, Rules::default());
        let switch = Switch { builder, rules, failed: None, is_disabled: false };
        Arc::new(Self {
            made_in: sys::Forks::generation(),
            ending: Arc::default(),
            gate: engine.gate,
            unreached: Arc::clone(&engine.unreached),
            dispatch: Arc::clone(&engine.names.dispatch),
            engine: OnceLock::from(engine),
            switch: Mutex::new(switch),
            early_warnings: Mutex::default(),
            dir: None,
        })
    }

    /// Whether this is the process that built it, not a forked child.
    pub(crate) fn is_here(&self) -> bool {
        self.made_in == sys::Forks::generation()
    }

    /// The engine for a hook, if it has anything to do.
    #[inline(always)]
    pub(crate) fn open_engine(&self) -> Option<&Engine> {
        if self.gate.is_open() { self.engine.get().map(|engine| &**engine) } else { None }
    }

    pub(crate) fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.get()
    }

    pub(crate) fn running(&self) -> Option<&Arc<Engine>> {
        self.engine.get().filter(|engine| engine.is_running())
    }

    pub(crate) fn rules(&self) -> Rules {
        self.switch.lock().rules.clone()
    }

    pub(crate) fn is_enabled(&self) -> bool {
        let switch = self.switch.lock();
        !switch.is_disabled && !switch.rules.is_off() && self.running().is_some()
    }

    /// Puts these rules in force.
    pub(crate) fn set_rules(&self, rules: Rules) -> Result<(), Error> {
        let installed = self.install_rules(&mut self.switch.lock(), rules);
        self.refresh_interest();
        installed
    }

    fn install_rules(&self, switch: &mut Switch, rules: Rules) -> Result<(), Error> {
        rules.check()?;
        if rules.is_off() {
            self.switch_off();
        } else {
            self.switch_on(switch, &rules)?;
        }
        switch.rules = rules;
        switch.is_disabled = false;
        Ok(())
    }

    /// Stops profiling new spans, or puts the last rules in force again, or the default rules if those keep nothing.
    pub(crate) fn set_enabled(&self, enabled: bool) -> Result<(), Error> {
        let mut switch = self.switch.lock();
        let changed = if enabled {
            let is_off = switch.rules.is_off();
            let rules = if is_off { Rules::default() } else { switch.rules.clone() };
            self.install_rules(&mut switch, rules)
        } else {
            self.switch_off();
            switch.is_disabled = true;
            Ok(())
        };
        drop(switch);
        self.refresh_interest();
        changed
    }

    /// Prevents further starts, and ends a running engine by `how`.
    pub(crate) fn end<R>(&self, how: impl FnOnce(&Engine) -> R) -> Option<R> {
        // Under the lock, so that a concurrent start has finished.
        let builder = self.switch.lock().builder.take();
        // Without the lock, because dropping the program's callbacks and exporters may call back.
        drop(builder);
        self.running().map(|engine| how(engine))
    }

    fn switch_on(&self, switch: &mut Switch, rules: &Rules) -> Result<(), Error> {
        match (self.engine.get(), switch.builder.take()) {
            (Some(engine), _) if engine.is_running() => {
                engine.replace_rules(rules.clone())?;
            }
            (None, Some(builder)) => {
                let builder = builder.rules(rules.clone());
                let shared = (Arc::clone(&self.unreached), Arc::clone(&self.dispatch));
                let engine = start(builder, self.dir.clone(), self.gate, shared);
                let engine = engine.inspect_err(|error| switch.failed = Some(error.clone()))?;
                let engine = self.engine.get_or_init(|| engine);
                self.pass_on_warnings();
                engine.open();
                // Before this, a flush finds an engine that runs, or has nothing to wait for.
                _ = self.ending.set(Arc::clone(&engine.publish.ending));
            }
            _ => return Err(switch.failed.clone().unwrap_or_else(Error::ended)),
        }
        Ok(())
    }

    fn switch_off(&self) {
        if let Some(engine) = self.running() {
            _ = engine.replace_rules(Rules::new([]));
        }
    }

    /// Makes `tracing` ask again which callsites the layer wants, and waits for that, so that new spans find the rules.
    pub(crate) fn refresh_interest(&self) {
        if !self.is_here() {
            return;
        }
        let _uncounted = sys::SuspendCounting::begin();
        let (done, is_done) = channel::bounded(1);
        refresh_interest(self.own_dispatch(), move || _ = done.send(()));
        // A layer could need a lock that the caller holds.
        _ = is_done.recv_timeout(LONGEST_REFRESH);
    }

    /// The subscriber that the layer is part of, if it is known.
    pub(crate) fn own_dispatch(&self) -> Option<Dispatch> {
        self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade)
    }

    /// Logs a warning once the layer has a subscriber and an engine.
    pub(crate) fn warn(&self, warning: LogEvent) {
        if self.is_here() {
            self.early_warnings.lock().push(warning);
            self.pass_on_warnings();
        }
    }

    fn pass_on_warnings(&self) {
        let Some(engine) = self.engine.get() else { return };
        let mut early = std::mem::take(&mut *self.early_warnings.lock());
        if !early.is_empty() {
            engine.warnings.lock().append(&mut early);
            engine.waker.wake();
        }
    }

    /// The subscriber that the layer is part of.
    pub(crate) fn set_dispatch(&self, dispatch: &Dispatch) {
        if !self.is_here() {
            return;
        }
        *self.dispatch.write() = Some(dispatch.downgrade());
        // The collector logs its source as soon as there is a subscriber.
        self.engine.get().into_iter().for_each(|engine| engine.waker.wake());
    }

    /// Logs that the rules were changed, or profiling disabled, from outside the program.
    pub(crate) fn log_rules(&self, by: &str) {
        /// The characters of the message: rules come over the network, and can be long.
        const LONGEST_RULES: usize = 1_000;
        // If nothing runs, nothing was changed.
        let Some(engine) = self.running() else { return };
        let rules = self.rules().to_string();
        let shown = line_of(&rules, LONGEST_RULES);
        let event = match self.is_enabled() {
            true => {
                LogEvent::info(LogKind::RulesChanged, format!("{by}: the rules are now `{shown}`"))
            }
            false => LogEvent::info(LogKind::Disabled, format!("{by}: profiling is disabled")),
        };
        // On the thread for that: some formatters show the span of the thread, whatever the event's parent. Waits, but not
        // for long: the log may block forever.
        const LONGEST: Duration = Duration::from_secs(1);
        let reporter = &engine.publish.reporter;
        reporter.log(LogEvent { rules: Some(rules), ..event });
        reporter.wait_for_log(Instant::now() + LONGEST);
    }
}
