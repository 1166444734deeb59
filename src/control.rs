//! Starting a layer's threads, and replacing its rules at run time.

#[cfg(feature = "axum")]
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;

use crate::collector::{Engine, Gate};
use crate::config::Builder;
use crate::error::Error;
use crate::keep::Rules;
use crate::otel::Pairing;
#[cfg(feature = "opentelemetry-sdk")]
use crate::otel::SpanEnds;
#[cfg(feature = "opentelemetry-sdk")]
use crate::span::TraceIds;
use crate::sys;
#[cfg(feature = "sighup")]
use crate::sys::EndHangups;

/// What a layer and its handles share, whether anything runs or not.
///
/// A layer that is made with rules that keep nothing starts nothing, until it is given others.
#[derive(Debug)]
pub(crate) struct Control {
    gate: &'static Gate,
    pairing: Arc<Pairing>,
    engine: OnceLock<Arc<Engine>>,
    made_with: Rules,
    /// In the child of a fork its locks may be held for ever.
    made_in: u32,
    /// The process itself.
    made_by: u32,
    switch: Mutex<Switch>,
    dispatch: Mutex<Option<WeakDispatch>>,
    /// Where profiles lie as files.
    #[cfg(feature = "axum")]
    folder: Option<PathBuf>,
    #[cfg(feature = "sighup")]
    hangups: Mutex<Option<EndHangups>>,
}

#[derive(Debug)]
struct Switch {
    /// What the engine will be made from.
    builder: Option<Builder>,
    /// The rules in force, and while it is disabled those that will be.
    rules: Rules,
    /// Why it could not be made.
    failed: Option<Error>,
    /// Somebody has asked for nothing to be profiled.
    is_disabled: bool,
}

impl Control {
    /// Starts what the builder's rules need.
    ///
    /// # Errors
    ///
    /// If the system does not let us start two threads.
    pub(crate) fn new(builder: Builder) -> Result<Arc<Self>, Error> {
        // Before any lock that a child could find taken.
        Engine::shut_in_children();
        let rules = builder.get_rules().clone();
        #[cfg(feature = "axum")]
        let folder = builder.folder();
        let control = Arc::new(Self {
            gate: Gate::new(),
            pairing: Arc::default(),
            engine: OnceLock::new(),
            made_with: rules.clone(),
            made_in: sys::fork_generation(),
            made_by: sys::process_id(),
            switch: Mutex::new(Switch {
                builder: Some(builder),
                rules: rules.clone(),
                failed: None,
                is_disabled: false,
            }),
            dispatch: Mutex::new(None),
            #[cfg(feature = "axum")]
            folder,
            #[cfg(feature = "sighup")]
            hangups: Mutex::new(None),
        });
        control.set_rules(rules)?;
        Ok(control)
    }

    /// Of an engine whose threads a test plays.
    #[cfg(test)]
    pub(crate) fn of_engine(engine: Arc<Engine>) -> Arc<Self> {
        let (builder, rules) = (None, Rules::default());
        let switch = Switch { builder, rules: rules.clone(), failed: None, is_disabled: false };
        Arc::new(Self {
            made_with: rules,
            made_in: sys::fork_generation(),
            made_by: sys::process_id(),
            gate: engine.gate,
            pairing: Arc::clone(&engine.pairing),
            engine: OnceLock::from(engine),
            switch: Mutex::new(switch),
            dispatch: Mutex::new(None),
            #[cfg(feature = "axum")]
            folder: None,
            #[cfg(feature = "sighup")]
            hangups: Mutex::new(None),
        })
    }

    /// Whether this is the process in which it was made.
    pub(crate) fn is_here(&self) -> bool {
        self.made_in == sys::fork_generation()
    }

    /// In the child of a fork: says that profiling has ended, if the process that made the layer is gone and
    /// this one goes on in its place, as a daemon does. (Who logs in another child may find a lock of
    /// the program's that is held for ever.) Takes no lock of ours.
    #[cold]
    pub(crate) fn say_if_forked(&self) {
        if !sys::has_ended(self.made_by) || !self.gate.take_forked() {
            return;
        }
        tracing::warn!(
            target: "tracing_profiling",
            "this process was forked from the one that made the profiling layer, which has ended: profiling has \
             ended; make the layer when the process has become a daemon"
        );
    }

    pub(crate) fn gate(&self) -> &'static Gate {
        self.gate
    }

    pub(crate) fn pairing(&self) -> &Pairing {
        &self.pairing
    }

    pub(crate) fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.get()
    }

    /// The engine, if it has not ended.
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

    /// These rules are in force from now on.
    pub(crate) fn set_rules(&self, rules: Rules) -> Result<(), Error> {
        self.put_in_force(&mut self.switch.lock(), rules)
    }

    fn put_in_force(&self, switch: &mut Switch, rules: Rules) -> Result<(), Error> {
        if rules.is_off() {
            self.switch_off();
        } else {
            self.switch_on(switch, &rules)?;
        }
        switch.rules = rules;
        switch.is_disabled = false;
        Ok(())
    }

    /// The same, but while it is disabled the rules only wait for that to end. Without rules it is those
    /// that the layer was made with.
    pub(crate) fn reload(&self, rules: Option<Rules>) -> Result<(), Error> {
        let rules = rules.unwrap_or_else(|| self.made_with.clone());
        let mut switch = self.switch.lock();
        if switch.is_disabled {
            switch.rules = rules;
            return Ok(());
        }
        self.put_in_force(&mut switch, rules)
    }

    /// The rules that were last set are in force again; the usual ones if those keep nothing.
    pub(crate) fn enable(&self) -> Result<(), Error> {
        let mut switch = self.switch.lock();
        let is_off = switch.rules.is_off();
        let rules = if is_off { Rules::default() } else { switch.rules.clone() };
        self.put_in_force(&mut switch, rules)
    }

    /// No span that is made from now on is profiled.
    pub(crate) fn disable(&self) {
        let mut switch = self.switch.lock();
        self.switch_off();
        switch.is_disabled = true;
    }

    /// Nothing is started from now on, and what runs ends by `how`.
    pub(crate) fn end<R>(&self, how: impl FnOnce(&Engine) -> R) -> Option<R> {
        // With the lock: who is starting it is done before.
        let builder = self.switch.lock().builder.take();
        // Without: what the program has given us may ask something of us.
        drop(builder);
        self.running().map(|engine| how(engine))
    }

    fn switch_on(&self, switch: &mut Switch, rules: &Rules) -> Result<(), Error> {
        match (self.engine.get(), switch.builder.take()) {
            (Some(engine), _) if engine.is_running() => {
                engine.replace_rules(rules.clone());
            }
            (None, Some(builder)) => {
                let builder = builder.rules(rules.clone());
                let engine = builder.start(self.gate, Arc::clone(&self.pairing));
                let engine = engine.inspect_err(|error| switch.failed = Some(error.clone()))?;
                // With the lock, until the engine can be found: so it is told of it here or there.
                let dispatch = self.dispatch.lock();
                if let Some(dispatch) = &*dispatch {
                    engine.set_dispatch(dispatch.clone());
                }
                _ = self.engine.set(engine);
                self.gate.open();
            }
            _ => return Err(switch.failed.clone().unwrap_or_else(Error::ended)),
        }
        Ok(())
    }

    fn switch_off(&self) {
        if let Some(engine) = self.running() {
            engine.replace_rules(Rules::new([]));
        }
    }

    /// The subscriber that the layer is part of.
    pub(crate) fn set_dispatch(&self, dispatch: &Dispatch) {
        if !self.is_here() {
            return;
        }
        let dispatch = dispatch.downgrade();
        let mut known = self.dispatch.lock();
        if let Some(engine) = self.engine.get() {
            engine.set_dispatch(dispatch.clone());
        }
        *known = Some(dispatch);
    }

    /// Where profiles can be found, if they become files.
    #[cfg(feature = "axum")]
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Waits for SIGHUP until that is dropped.
    #[cfg(feature = "sighup")]
    pub(crate) fn set_hangups(&self, hangups: Option<EndHangups>) {
        *self.hangups.lock() = hangups;
    }

    /// Runs `action` with our subscriber as the default.
    #[cfg(feature = "sighup")]
    pub(crate) fn with_dispatch(&self, action: impl FnOnce()) {
        let dispatch = self.dispatch.lock().as_ref().and_then(WeakDispatch::upgrade);
        match dispatch {
            Some(dispatch) => tracing::dispatcher::with_default(&dispatch, action),
            None => action(),
        }
    }

    /// From now on a span processor sees OpenTelemetry's spans end.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn expect_processor(&self) {
        self.pairing.expect_processor();
        self.gate.set_look(true);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if self.is_here() {
            self.end(Engine::shutdown_later);
        }
    }
}

#[cfg(feature = "opentelemetry-sdk")]
impl SpanEnds for Control {
    fn ended(&self, ids: TraceIds) {
        if let Some(engine) = self.running() {
            engine.ended(ids);
        }
    }
}
