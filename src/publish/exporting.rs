//! The thread that exports.

use std::convert::Infallible;
use std::time::SystemTime;

use crossbeam::channel::{self, Receiver, Sender, select};

use super::delivery::{Delivery, PublishState};
use super::job::{FlushRequest, ShutdownDeadline};
use super::outbox::HeldProfile;
use crate::error::FlushError;
use crate::history::HourlyHistory;
use crate::keep::Kept;

#[derive(Debug)]
pub(super) enum ExportJob {
    Deliver(Box<HeldProfile>),
    /// Count a promised profile as lost, since it could not be symbolized.
    Lose(Box<Kept>),
    /// Acknowledge once all earlier profiles are delivered.
    Done(FlushRequest),
    Stop(ShutdownDeadline),
}

pub(super) struct ExportThread {
    pub(super) jobs: Receiver<ExportJob>,
    pub(super) delivery: Delivery,
    /// The exporting thread writes the history, since a file system can block it already.
    pub(super) history: HourlyHistory,
    pub(super) _delivers: Sender<Infallible>,
}

impl ExportThread {
    pub(super) fn run(mut self) {
        self.history.begin(SystemTime::now());
        self.log();
        loop {
            let wake = self.delivery.next_attempt().map_or_else(channel::never, channel::at);
            let due = self.history.due_in(SystemTime::now());
            let due = due.map_or_else(channel::never, channel::after);
            let job = select! {
                recv(self.jobs) -> job => Some(job.unwrap_or(ExportJob::Stop(ShutdownDeadline::FAILED))),
                recv(self.delivery.answers) -> answer => {
                    self.delivery.note_answer(answer);
                    None
                }
                recv(wake) -> _ => None,
                recv(due) -> _ => None,
            };
            match job {
                Some(ExportJob::Deliver(held)) => self.delivery.deliver(held),
                Some(ExportJob::Lose(report)) => self.delivery.lose(*report),
                Some(ExportJob::Done(FlushRequest { done, deadline })) => {
                    let flushed = self.delivery.flush(deadline);
                    self.history.flush(SystemTime::now());
                    self.log();
                    let lost = flushed.clone();
                    if !done.send(flushed) {
                        self.delivery.note_unanswered(lost);
                    }
                }
                Some(ExportJob::Stop(last)) => return self.end(last),
                None => {}
            }
            self.delivery.advance(false);
            self.history.advance(SystemTime::now());
            self.log();
        }
    }

    fn log(&mut self) {
        self.history.events.drain(..).for_each(|event| self.delivery.shared.reporter.log(event));
    }

    fn end(mut self, last: ShutdownDeadline) {
        let flushed = self.delivery.flush(last.deadline());
        self.history.flush(SystemTime::now());
        self.log();
        let PublishState { reporter, ending, .. } = self.delivery.shared.clone();
        let came_all = if last.has_failed { Err(FlushError::Ended) } else { Ok(()) };
        let ended = flushed.and(self.delivery.end()).and(came_all);
        // Nothing is reported from here on.
        reporter.close();
        _ = ending.answer.set(ended);
    }
}
