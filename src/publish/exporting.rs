//! The thread that exports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, select};

use super::delivery::{Delivery, HeldProfile, PublishState};
use super::job::FlushRequest;
use crate::export::AnyExporter;
use crate::keep::Kept;
use crate::sys::{Files, FilesGuard};

/// How long the last profiles may take if no caller waits for them.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// A message to the exporting thread.
#[derive(Debug)]
pub(super) enum ExportJob {
    Deliver(Box<HeldProfile>),
    /// Count a promised profile as lost, since it could not be symbolized.
    Lose(Box<Kept>),
    /// Acknowledge once all earlier profiles are delivered.
    Done(FlushRequest),
    /// Stop, then acknowledge.
    Stop(Vec<FlushRequest>),
}

pub(super) struct ExportThread {
    jobs: Receiver<ExportJob>,
    delivery: Delivery,
}

impl ExportThread {
    /// `problem` is an error of the exporter that was found when it was made.
    pub(super) fn new(
        shared: PublishState,
        jobs: Receiver<ExportJob>,
        exporter: FilesGuard<AnyExporter>,
        files: Arc<Files>,
        problem: Option<String>,
    ) -> Self {
        Self { jobs, delivery: Delivery::new(shared, exporter, files, problem) }
    }

    pub(super) fn run(mut self) {
        self.delivery.start();
        loop {
            let wake = self.delivery.next_attempt().map_or_else(channel::never, channel::at);
            let answers = self.delivery.answers();
            let job = select! {
                recv(self.jobs) -> job => Some(job.unwrap_or(ExportJob::Stop(Vec::new()))),
                recv(answers) -> answer => {
                    self.delivery.note_answer(answer);
                    None
                }
                recv(wake) -> _ => None,
            };
            crate::sys::admit_process_timer();
            match job {
                Some(ExportJob::Deliver(held)) => {
                    crate::sys::read_filters();
                    match self.delivery.has_lost_exporter() {
                        true => self.delivery.lose(held.report),
                        false => self.delivery.deliver(*held),
                    }
                }
                Some(ExportJob::Lose(report)) => self.delivery.lose(*report),
                Some(ExportJob::Done(FlushRequest { done, deadline })) => {
                    done.send(self.delivery.flush(deadline));
                }
                Some(ExportJob::Stop(waiting)) => return self.end(waiting),
                None => {}
            }
            self.delivery.advance(false);
        }
    }

    /// Delivers what can be delivered, and drops everything else.
    fn end(mut self, waiting: Vec<FlushRequest>) {
        let deadline = waiting.iter().map(|waiting| waiting.deadline).max();
        let flushed = self.delivery.flush(deadline.unwrap_or_else(|| Instant::now() + LAST_FLUSH));
        let reporter = Arc::clone(self.delivery.reporter());
        let ended = flushed.and(self.delivery.end());
        // Nothing is reported from here on.
        reporter.close();
        waiting.into_iter().for_each(|waiting| waiting.done.send(ended.clone()));
    }
}
