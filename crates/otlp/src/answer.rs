//! What the receiver answers, as the layer understands it.

use std::error::Error;
use std::iter::successors;

use tracing_profiling_profile::export::remote::{Answer, RefusedScope};
use tracing_profiling_profile::text::disturbs;

use crate::protocol::{
    DEVELOPMENT_VERSION, DEVELOPMENT_VERSION_HEADER, ExportProfilesServiceResponse,
};

/// The maximum number of bytes that are read of an answer.
pub(crate) const MOST_ANSWER_BYTES: usize = 64 * 1024;
/// The maximum number of characters that are shown of a server's message.
pub(crate) const MOST_SHOWN_CHARS: usize = 400;

pub(crate) fn no_answer(problem: String) -> Answer {
    Answer::NotNow { after: None, problem }
}

/// The receiver calls the request invalid. If it does not know the version of the format, it will accept no profile
/// until one of both is updated; the protocol forbids to try another version.
pub(crate) fn invalid(problem: String) -> Answer {
    if !problem.to_ascii_lowercase().contains(DEVELOPMENT_VERSION_HEADER) {
        return Answer::Refused { what: RefusedScope::Request, problem };
    }
    let problem = format!(
        "{problem}; this release of tracing-profiling sends version {DEVELOPMENT_VERSION}: update it, or the receiver"
    );
    Answer::Refused { what: RefusedScope::All, problem }
}

/// Makes the texts safe for a log, because a server can return anything.
pub(crate) fn single_line(mut answer: Answer) -> Answer {
    let (Answer::Accepted { message: text }
    | Answer::NotNow { problem: text, .. }
    | Answer::Refused { problem: text, .. }) = &mut answer;
    *text = text.chars().filter(|c| !disturbs(*c)).take(MOST_SHOWN_CHARS).collect();
    answer
}

pub(crate) fn accepted(response: ExportProfilesServiceResponse) -> Answer {
    let partial = response.partial_success.unwrap_or_default();
    let message = partial.error_message;
    match partial.rejected_profiles {
        ..=0 => Answer::Accepted { message },
        // The receiver counts a profile's samples and waits as two profiles.
        _ => Answer::Refused { what: RefusedScope::Request, problem: message },
    }
}

pub(crate) fn whole(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in successors(error.source(), |&error| error.source()).map(ToString::to_string) {
        // Some errors repeat their source.
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
