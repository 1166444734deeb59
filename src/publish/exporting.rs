//! The thread that exports.

use std::time::SystemTime;

use crossbeam::channel::{self, Receiver, select};

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

impl Delivery {
    /// Runs until [`ExportJob::Stop`]. This thread writes the history, too, since a file system can block it already.
    pub(super) fn run(mut self, jobs: &Receiver<ExportJob>, mut history: HourlyHistory) {
        history.begin(SystemTime::now());
        loop {
            self.log(&mut history);
            let wake = self.next_attempt().map_or_else(channel::never, channel::at);
            let due = history.due_in(SystemTime::now());
            let due = due.map_or_else(channel::never, channel::after);
            let job = select! {
                recv(jobs) -> job => Some(job.unwrap_or(ExportJob::Stop(ShutdownDeadline::FAILED))),
                recv(self.answers) -> answer => {
                    self.note_answer(answer);
                    None
                }
                recv(wake) -> _ => None,
                recv(due) -> _ => None,
            };
            match job {
                Some(ExportJob::Deliver(held)) => self.deliver(held),
                Some(ExportJob::Lose(report)) => self.lose(*report),
                Some(ExportJob::Done(FlushRequest { done, deadline })) => {
                    let flushed = self.flush(deadline);
                    history.flush(SystemTime::now());
                    self.log(&mut history);
                    let lost = flushed.clone();
                    if !done.send(flushed) {
                        self.note_unanswered(lost);
                    }
                }
                Some(ExportJob::Stop(last)) => return self.stop(last, history),
                None => {}
            }
            self.advance(false);
            history.advance(SystemTime::now());
        }
    }

    fn log(&self, history: &mut HourlyHistory) {
        history.events.drain(..).for_each(|event| self.shared.reporter.log(event));
    }

    fn stop(mut self, last: ShutdownDeadline, mut history: HourlyHistory) {
        let flushed = self.flush(last.deadline());
        history.flush(SystemTime::now());
        self.log(&mut history);
        let PublishState { reporter, ending, .. } = self.shared.clone();
        let came_all = if last.has_failed { Err(FlushError::Ended) } else { Ok(()) };
        let ended = flushed.and(self.end()).and(came_all);
        // Nothing is reported from here on.
        reporter.close();
        _ = ending.answer.set(ended);
    }
}
