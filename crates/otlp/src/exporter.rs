//! The exporter: encodes profiles and sends them from its own thread.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use crossbeam::channel::{self, Receiver};
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tracing_profiling_capture::sys;
use tracing_profiling_profile::encode::{HtmlContext, otlp_message};
use tracing_profiling_profile::export::remote::{
    Answer, AnswerTo, QueueLimits, RefusedScope, Remote,
};
use tracing_profiling_profile::export::{
    Directory, ExportError, Exported, Exporter, Unexportable, resource_from_env,
};
use tracing_profiling_profile::profile::{Attribute, Profile, Resource, Value};

use crate::transport::Transport;

/// Sends profiles to an OpenTelemetry collector or another OTLP receiver.
///
/// The profiles of a layer wait in a bounded queue. A thread sends them in turn, each after the receiver has answered
/// the one before. While the receiver is unavailable, kept spans get no profile and no `profile.id`. With a
/// [fallback directory](crate::OtlpBuilder::fallback_directory), profiles are written there instead and sent later.
///
/// Without a layer, [`export`](Exporter::export) sends one request and waits for the answer. That is also what an exporter
/// of your own does that calls it: the queue and the fallback directory are not used then.
///
/// Needs the feature `otlp-http` or `otlp-grpc`. The receiver must support
/// `opentelemetry.proto.profiles.v1development`, which is not stable yet.
#[derive(Debug)]
pub struct OtlpExporter {
    pub(crate) limits: QueueLimits,
    /// Limit of one request, before compression.
    pub(crate) request_bytes: usize,
    pub(crate) resource: Option<Resource>,
    pub(crate) fallback: Option<Directory>,
    /// The receiver's address, for display.
    pub(crate) endpoint: String,
    /// `None` once the thread has it.
    pub(crate) transport: Option<Transport>,
    pub(crate) link: Option<SenderLink>,
    /// Answers to profiles that are exported without a layer.
    pub(crate) answers: Option<Receiver<Answer>>,
}

/// The messages to the sending thread, which ends when the second value is dropped.
type SenderLink = (mpsc::UnboundedSender<Bytes>, oneshot::Sender<Infallible>);

/// The largest divisor for downsampling a profile that does not fit.
const THINNEST: usize = 1 << 20;
/// A name lookup can hang for longer than a request, and cannot be cancelled.
const MOST_LOOKUPS: usize = 4;

impl Exporter for OtlpExporter {
    /// Sends the profile once and waits for the answer. (A layer does not wait, and retries.)
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        if self.answers.is_none() {
            let (sender, answers) = channel::unbounded();
            self.start(Box::new(move |answer| _ = sender.send(answer)), || {})?;
            self.answers = Some(answers);
        }
        let message = self.message(profile);
        self.send(message.into());
        match self.answers.as_ref().map(Receiver::recv) {
            Some(Ok(Answer::Accepted { .. })) => Ok(Exported::default()),
            Some(Ok(
                Answer::NotNow { problem, .. }
                | Answer::Refused { what: RefusedScope::All, problem },
            )) => Err(problem.into()),
            Some(Ok(Answer::Refused { problem, .. })) => Err(Unexportable(problem).into()),
            _ => Err("the thread that sends profiles has ended".into()),
        }
    }

    fn directory(&self) -> Option<&Path> {
        self.fallback.as_ref().and_then(Exporter::directory)
    }

    fn remote(&mut self) -> Option<&mut dyn Remote> {
        Some(self)
    }

    fn set_context(&mut self, context: &HtmlContext) {
        self.resource.get_or_insert_with(|| context.resource().clone());
        if let Some(fallback) = &mut self.fallback {
            fallback.set_context(context);
        }
    }
}

impl Remote for OtlpExporter {
    fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// The thread has its own runtime, so the program needs none. Requests open spans, which the program's subscriber
    /// must not receive.
    fn start(&mut self, answer: AnswerTo, on_thread: fn()) -> io::Result<()> {
        let Some(mut transport) = self.transport.take() else { return Ok(()) };
        let (sender, mut messages) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .thread_name("profiling-otlp")
            .thread_stack_size(sys::STACK_BYTES)
            .max_blocking_threads(MOST_LOOKUPS)
            .on_thread_start(on_thread)
            .build()?;
        sys::spawn("profiling-otlp", move || {
            on_thread();
            let no_subscriber = tracing::subscriber::NoSubscriber::default();
            tracing::subscriber::with_default(no_subscriber, || {
                // If this panics, `answer` is dropped.
                let work = async move {
                    while let Some(message) = messages.recv().await {
                        answer(transport.send(message).await);
                    }
                };
                runtime.block_on(async {
                    tokio::spawn(work);
                    _ = stopped.await;
                });
                // Name lookups run on blocking threads, which cannot be cancelled.
                runtime.shutdown_background();
            });
        })?;
        self.link = Some((sender, stop));
        Ok(())
    }

    /// A profile that does not fit into a request is downsampled and marked.
    fn message(&mut self, profile: &Profile) -> Vec<u8> {
        let resource = self.resource.get_or_insert_with(resource_from_env);
        let most = self.request_bytes;
        let mut message = otlp_message(profile, resource);
        let mut bytes = message.encoded_len();
        let mut every = bytes.div_ceil(most.max(1)).max(2);
        while bytes > most && every <= THINNEST {
            // One in `every` samples of each kind.
            let mut fewer = profile.downsampled(every);
            let left_out = profile.point_count() - fewer.point_count();
            let value = Value::Int(i64::try_from(left_out).unwrap_or(i64::MAX));
            fewer.attributes.push(Attribute { key: "profile.downsampled_to_fit", value });
            message = otlp_message(&fewer, resource);
            bytes = message.encoded_len();
            every *= 2;
        }
        message.encode_to_vec()
    }

    fn send(&self, message: Arc<[u8]>) {
        if let Some((messages, _)) = &self.link {
            _ = messages.send(Bytes::from_owner(message));
        }
    }

    fn fallback(&self) -> Option<&Directory> {
        self.fallback.as_ref()
    }

    fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

#[cfg(test)]
mod tests {
    use tracing_profiling_profile::encode::otlp_messages as proto;
    use tracing_profiling_profile::profile::{Point, ProfileId, SampleKind};

    use super::*;

    /// `points` samples of one stack, and as many waits.
    fn profile(points: u64) -> Profile {
        let mut profile = Profile::new(ProfileId::from_bytes([1; 16]), 5);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for time_unix_ns in 0..points {
            for (kind, weight_ns) in [(SampleKind::OnCpu, 5), (SampleKind::OffCpu, 7)] {
                profile.add_sample(
                    kind,
                    stack,
                    None,
                    Point { time_unix_ns, weight: weight_ns, thread: None },
                );
            }
        }
        profile
    }

    fn exporter(request_bytes: usize) -> OtlpExporter {
        let builder = OtlpExporter::builder().request_bytes(request_bytes);
        builder.build_with(&|_| Ok(None)).unwrap()
    }

    #[test]
    fn a_profile_that_does_not_fit_is_downsampled_and_marked() {
        let whole = profile(10_000);
        let alone = exporter(usize::MAX).message(&whole);
        let read = |bytes: &[u8]| proto::ProfilesData::decode(bytes).unwrap();
        let most = alone.len() / 10;
        let item = exporter(most).message(&whole);
        assert!(item.len() <= most && item.len() > most / 10, "{} of {most}", item.len());
        let message = read(&item);
        let tables = message.dictionary.unwrap();
        assert!(tables.string_table.iter().any(|string| string == "profile.downsampled_to_fit"));
        assert!(
            !read(&alone)
                .dictionary
                .unwrap()
                .string_table
                .contains(&"profile.downsampled_to_fit".to_owned())
        );
        // The sums are unchanged.
        let profiles = &message.resource_profiles[0].scope_profiles[0].profiles;
        let [on_cpu, off_cpu] = &profiles[..] else { panic!("two") };
        // (If all samples have the same weight, there are timestamps and no values; otherwise each value is a weight.)
        let values = |profile: &proto::Profile| -> i64 {
            let times = profile.samples.iter().map(|sample| sample.timestamps_unix_nano.len());
            match profile.samples.iter().flat_map(|sample| &sample.values).sum() {
                0 => i64::try_from(times.sum::<usize>()).unwrap() * profile.period,
                sum => sum,
            }
        };
        assert_eq!((values(on_cpu), values(off_cpu)), (50_000, 70_000));
    }

    #[test]
    fn a_profile_that_cannot_shrink_is_sent_unchanged() {
        assert!(exporter(1).message(&profile(3)).len() > 1);
    }

    #[test]
    fn the_directory_is_the_fallback_directory() {
        assert_eq!(exporter(1).directory(), None);
        let builder = OtlpExporter::builder().fallback_directory(Directory::new("/profiles"));
        let exporter = builder.build_with(&|_| Ok(None)).unwrap();
        assert_eq!(exporter.directory(), Some(Path::new("/profiles")));
    }
}
