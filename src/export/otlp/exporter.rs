//! The exporter: takes profiles, and leaves the sending to a thread of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;

use super::queue::{Bounds, Item, Queue, Stored};
use super::sender::{self, Sender};
use super::settings::OtlpBuilder;
use super::transport::Transport;
use crate::encode;
use crate::export::directory::{self, Directory};
use crate::export::{ExportError, Exported, Exporter, Fate, Reporter};
use crate::profile::{Attribute, Profile, Resource, Value};

/// Sends profiles to an OpenTelemetry collector, or whatever else takes OTLP.
///
/// A profile that it has taken waits in a queue of bounded length, from which a thread sends one after the other,
/// each until the receiver has answered. While the receiver is away no profile
/// is taken, so that no span is given an id that leads nowhere; or it goes to the
/// [fallback directory](OtlpBuilder::fallback_directory) and is sent later.
///
/// Needs the feature `otlp-http` or `otlp-grpc`. The receiver must speak
/// `opentelemetry.proto.profiles.v1development`, which is not stable yet.
#[derive(Debug)]
pub struct OtlpExporter {
    queue: Arc<Queue>,
    resource: Option<Resource>,
    /// Where the fallback directory is.
    path: Option<PathBuf>,
    fallback: Option<Arc<Directory>>,
    reporter: Reporter,
    /// Until the thread has it.
    transport: Option<Transport>,
    /// Why there is no thread.
    broken: Option<String>,
}

/// How much thinner a profile is made that does not fit, at most.
const THINNEST: usize = 1 << 20;

impl OtlpExporter {
    /// Settings other than those of the environment.
    pub fn builder() -> OtlpBuilder {
        OtlpBuilder::default()
    }

    pub(super) fn new(
        transport: Transport,
        bounds: Bounds,
        resource: Option<Resource>,
        fallback: Option<PathBuf>,
    ) -> Self {
        Self {
            queue: Queue::new(bounds),
            resource,
            path: fallback.map(|path| std::path::absolute(&path).unwrap_or(path)),
            fallback: None,
            reporter: Reporter::default(),
            transport: Some(transport),
            broken: None,
        }
    }

    /// The same with a resource, if it was given none.
    pub(crate) fn with_default_resource(mut self, resource: Resource) -> Self {
        self.resource.get_or_insert(resource);
        self
    }

    /// Starts the thread, if nobody has.
    fn ensure_started(&mut self) {
        let Some(transport) = self.transport.take() else { return };
        self.resource.get_or_insert_with(Resource::from_env);
        let directory = |path: &PathBuf| Arc::new(Directory::new(path));
        self.fallback = self.path.as_ref().map(directory);
        let (queue, fallback) = (Arc::clone(&self.queue), self.fallback.clone());
        let sender = Sender::new(queue, transport, self.reporter.clone(), fallback);
        self.broken =
            sender.start().err().map(|error| format!("no thread to send profiles: {error}"));
    }

    fn problem(&self) -> Option<String> {
        self.broken.clone().or_else(|| self.queue.problem())
    }

    /// The message that is sent. A profile that does not fit into one is thinned, and says so.
    fn encode(&self, profile: &Profile) -> Vec<u8> {
        let default;
        let resource = match &self.resource {
            Some(resource) => resource,
            None => {
                default = Resource::from_env();
                &default
            }
        };
        let most = self.queue.bounds.request_bytes;
        let mut message = encode::otlp_message(profile, resource);
        let mut bytes = message.encoded_len();
        let mut every = bytes.div_ceil(most.max(1)).max(2);
        while bytes > most && every <= THINNEST {
            message = encode::otlp_message(&thinned(profile, every), resource);
            bytes = message.encoded_len();
            every *= 2;
        }
        message.encode_to_vec()
    }
}

/// One sample, and one wait, of so many.
fn thinned(whole: &Profile, every: usize) -> Profile {
    let count = |profile: &Profile| profile.sample_count() + profile.wait_count();
    let mut profile = whole.clone().thinned(every);
    let left_out = count(whole) - count(&profile);
    let value = Value::Int(i64::try_from(left_out).unwrap_or(i64::MAX));
    profile.attributes.push(Attribute { key: "profile.thinned_to_fit", value });
    profile
}

impl Exporter for OtlpExporter {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.ensure_started();
        let Some(problem) = self.problem() else {
            let encoded = self.encode(profile).into();
            let stem = directory::stem(profile);
            self.queue.push(Item { encoded, since: Instant::now(), stem });
            return Ok(Exported::default());
        };
        let Some(fallback) = &self.fallback else { return Err(problem.into()) };
        let files = fallback.store(profile, Some(self.encode(profile)))?;
        self.reporter.count(Fate::Stored, 1);
        let encoded = files.iter().find(|path| path.extension().is_some_and(|e| e == "otlp"));
        if let Some(path) = encoded.cloned() {
            self.queue.push_stored(Stored { path, since: Instant::now() });
        }
        Ok(Exported::to_files(files))
    }

    fn check(&mut self) -> Result<(), ExportError> {
        let Some(problem) = self.problem() else { return Ok(()) };
        match &self.path {
            // There profiles go meanwhile, if they can.
            Some(path) => Directory::new(path).check(),
            None => Err(problem.into()),
        }
    }

    fn start(&mut self, reporter: Reporter) {
        self.reporter = reporter;
        self.ensure_started();
    }

    fn flush(&mut self, deadline: Instant) -> bool {
        self.queue.flush(deadline)
    }

    fn delivers_later(&self) -> bool {
        // With a directory nothing is lost; and who has no end of patience wants all to wait.
        self.path.is_none() && self.queue.bounds.patience < Duration::MAX
    }

    fn directory(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}

impl Drop for OtlpExporter {
    /// What is not delivered by now will not be.
    fn drop(&mut self) {
        let left = self.queue.close();
        let stored = sender::store(self.fallback.as_deref(), &left);
        self.reporter.count(Fate::Stored, stored);
        self.reporter.count(Fate::AtShutdown, (left.len() as u64).saturating_sub(stored));
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::profiles::v1development as proto;

    use super::*;
    use crate::profile::{Point, ProfileId, SampleKind};

    /// So many samples of one stack, and as many waits.
    fn profile(points: u64) -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(1), 5);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for time_unix_ns in 0..points {
            for (kind, weight_ns) in [(SampleKind::OnCpu, 5), (SampleKind::OffCpu, 7)] {
                profile.add_sample(kind, stack, None, Point { time_unix_ns, weight_ns });
            }
        }
        profile
    }

    fn exporter(request_bytes: usize) -> OtlpExporter {
        let builder = OtlpExporter::builder().request_bytes(request_bytes);
        builder.build_with(&|_| Ok(None)).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_thinned_and_says_so() {
        let whole = profile(10_000);
        let alone = exporter(usize::MAX).encode(&whole);
        let read = |bytes: &[u8]| proto::ProfilesData::decode(bytes).unwrap();
        let most = alone.len() / 10;
        let item = exporter(most).encode(&whole);
        assert!(item.len() <= most && item.len() > most / 10, "{} of {most}", item.len());
        let message = read(&item);
        let tables = message.dictionary.unwrap();
        assert!(tables.string_table.iter().any(|string| string == "profile.thinned_to_fit"));
        assert!(
            !read(&alone)
                .dictionary
                .unwrap()
                .string_table
                .contains(&"profile.thinned_to_fit".to_owned())
        );
        // The sums are as they were.
        let profiles = &message.resource_profiles[0].scope_profiles[0].profiles;
        let [on_cpu, off_cpu] = &profiles[..] else { panic!("two") };
        // (Where all stand for the same time there is a time for each and no value, else each is its time.)
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
    fn what_can_be_made_no_smaller_is_sent_as_it_is() {
        assert!(exporter(1).encode(&profile(3)).len() > 1);
    }

    #[test]
    fn while_the_receiver_is_away_the_fallback_directory_must_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        for (path, expected) in [
            (None, Some("gone")),
            (Some(folder.path().to_owned()), None),
            (Some(file.path().join("below")), Some("cannot write to")),
        ] {
            let mut builder = OtlpExporter::builder().patience(std::time::Duration::ZERO);
            if let Some(path) = path {
                builder = builder.fallback_directory(path);
            }
            let mut exporter = builder.build_with(&|_| Ok(None)).unwrap();
            assert!(exporter.check().is_ok(), "nothing is needed of it");
            exporter.queue.note_failure("gone", std::time::Duration::ZERO, false);
            let problem = exporter.check().err().map(|error| error.to_string());
            match expected {
                Some(expected) => assert!(problem.unwrap().contains(expected)),
                None => assert_eq!(problem, None),
            }
        }
    }

    #[test]
    fn it_names_the_fallback_directory_only() {
        assert_eq!(exporter(1).directory(), None);
        let builder = OtlpExporter::builder().fallback_directory("/profiles");
        let exporter = builder.build_with(&|_| Ok(None)).unwrap();
        assert_eq!(exporter.directory(), Some(Path::new("/profiles")));
    }
}
