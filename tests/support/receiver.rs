//! An OTLP receiver of profiles, over HTTP or gRPC, with scripted behavior.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use opentelemetry_proto::tonic::collector::profiles::v1development::profiles_service_server::{
    ProfilesService, ProfilesServiceServer,
};
use opentelemetry_proto::tonic::collector::profiles::v1development::{
    ExportProfilesPartialSuccess, ExportProfilesServiceRequest, ExportProfilesServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::profiles::v1development::{Profile, ProfilesDictionary, ValueType};
use prost::Message;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// How it treats one request.
#[derive(Clone, Debug)]
pub(crate) enum Behavior {
    /// Accepts it, and reports this number of its profiles as rejected.
    Accept(i64),
    /// Answers with this HTTP status, or the corresponding gRPC status, and a retry delay.
    Refuse(u16, Option<Duration>),
    /// Discards it and never answers.
    Hang,
    /// Accepts it and answers with these bytes.
    Respond(&'static [u8]),
    /// Accepts it, and answers when [`Receiver::release`] is called.
    Hold,
}

/// One request that arrived.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    pub(crate) at: Instant,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) message: ExportProfilesServiceRequest,
    /// It was answered with success.
    pub(crate) is_accepted: bool,
}

#[derive(Default)]
struct Shared {
    got: Mutex<Vec<Got>>,
    script: Mutex<VecDeque<Behavior>>,
    /// How it treats requests after the script; it accepts them if this is not set.
    then: Mutex<Option<Behavior>>,
    came: Condvar,
    released: tokio::sync::Notify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    Http,
    Grpc,
}

pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    speaks: Speaks,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// An address without a listener.
pub(crate) fn free_address() -> SocketAddr {
    let listener = TcpListener::bind((unused_ip(), 0)).unwrap();
    // A process that another test spawns may briefly hold the socket too. After a shutdown it no longer listens.
    #[cfg(target_os = "linux")]
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    listener.local_addr().unwrap()
}

/// A loopback address that is different each time. Outgoing connections use 127.0.0.1, so one of them could take a free
/// port of that address before the receiver listens.
pub(crate) fn unused_ip() -> Ipv4Addr {
    static USED: AtomicU8 = AtomicU8::new(0);
    if cfg!(not(target_os = "linux")) {
        return Ipv4Addr::LOCALHOST;
    }
    let number = USED.fetch_add(1, Ordering::Relaxed);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high & 0x7f | 1, low, number)
}

impl Receiver {
    pub(crate) fn new(speaks: Speaks) -> Self {
        Self::at(speaks, free_address())
    }

    pub(crate) fn at(speaks: Speaks, address: SocketAddr) -> Self {
        let mut receiver = Self::offline(speaks, address);
        receiver.start();
        receiver
    }

    /// A receiver that does not listen yet.
    pub(crate) fn offline(speaks: Speaks, address: SocketAddr) -> Self {
        Self { address, speaks, shared: Arc::default(), runtime: None }
    }

    pub(crate) fn with_tls(speaks: Speaks, tls: ServerTlsConfig) -> Self {
        // The certificate is for this address.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let mut receiver = Self::offline(speaks, address);
        receiver.start_with(Some(tls));
        receiver
    }

    pub(crate) fn start(&mut self) {
        self.start_with(None);
    }

    fn start_with(&mut self, tls: Option<ServerTlsConfig>) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::clone(&self.shared);
        let speaks = self.speaks;
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            match speaks {
                Speaks::Http => {
                    let app = Router::new().fallback(by_http).with_state(shared);
                    let Some(tls) = tls else { return axum::serve(listener, app).await.unwrap() };
                    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
                    let mut server = Server::builder().accept_http1(true).tls_config(tls).unwrap();
                    let served = server.add_routes(app.into()).serve_with_incoming(incoming);
                    served.await.unwrap();
                }
                Speaks::Grpc => {
                    let service = ProfilesServiceServer::new(ByGrpc(shared))
                        .accept_compressed(CompressionEncoding::Gzip);
                    let mut server = Server::builder();
                    if let Some(tls) = tls {
                        server = server.tls_config(tls).unwrap();
                    }
                    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
                    let served = server.add_service(service).serve_with_incoming(incoming);
                    served.await.unwrap();
                }
            }
        });
        self.runtime = Some(runtime);
    }

    /// Closes all connections and stops listening.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(10));
        }
    }

    /// Appends to the script. Requests after its end are accepted unless [`Self::always`] is set.
    pub(crate) fn will(&self, script: impl IntoIterator<Item = Behavior>) -> &Self {
        lock(&self.shared.script).extend(script);
        self
    }

    /// Sets how requests after the script are treated.
    pub(crate) fn always(&self, behavior: Behavior) -> &Self {
        *lock(&self.shared.then) = Some(behavior);
        self
    }

    /// Accepts all requests from now on.
    pub(crate) fn accept_all(&self) {
        lock(&self.shared.script).clear();
        *lock(&self.shared.then) = None;
    }

    pub(crate) fn release(&self) {
        self.shared.released.notify_one();
    }

    pub(crate) fn got(&self) -> Vec<Got> {
        lock(&self.shared.got).clone()
    }

    /// Waits until this number of requests has arrived.
    pub(crate) fn wait_for(&self, requests: usize) {
        let got = lock(&self.shared.got);
        let patience = super::support::PLENTY;
        let few = |got: &mut Vec<Got>| got.len() < requests;
        let got = self.shared.came.wait_timeout_while(got, patience, few).unwrap().0;
        assert!(got.len() >= requests, "{requests} requests");
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The accepted profiles.
    pub(crate) fn profiles(&self) -> Vec<Profile> {
        let got = self.got().into_iter().filter(|got| got.is_accepted);
        got.flat_map(|got| got.message.resource_profiles)
            .flat_map(|resource_profiles| resource_profiles.scope_profiles)
            .flat_map(|scope_profiles| scope_profiles.profiles)
            .collect()
    }

    /// The distinct contents of each profile that arrived, accepted or not. A profile that arrives several times must
    /// have the same content each time.
    pub(crate) fn bodies(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut bodies: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for got in self.got() {
            let tables = got.message.dictionary.unwrap_or_default();
            for resource_profiles in got.message.resource_profiles {
                for profile in resource_profiles.scope_profiles.iter().flat_map(|s| &s.profiles) {
                    let body =
                        format!("{:?} {}", resource_profiles.resource, body(profile, &tables));
                    bodies.entry(hex(&profile.profile_id)).or_default().insert(body);
                }
            }
        }
        bodies
    }

    /// The ids of all accepted profiles, in order. Those of waits are separate.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.profiles().into_iter().map(|profile| hex(&profile.profile_id)).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.kill();
    }
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The content of a profile, with all dictionary references resolved.
fn body(profile: &Profile, tables: &ProfilesDictionary) -> String {
    let string = |index: i32| tables.string_table[index as usize].as_str();
    let kind = |kind: &Option<ValueType>| {
        kind.map(|kind| (string(kind.type_strindex), string(kind.unit_strindex)))
    };
    let attributes = |indices: &[i32]| {
        let entries = indices.iter().map(|index| &tables.attribute_table[*index as usize]);
        let texts =
            entries.map(|entry| format!("{}={:?}", string(entry.key_strindex), entry.value));
        texts.collect::<Vec<_>>()
    };
    let location = |index: &i32| {
        let location = &tables.location_table[*index as usize];
        let mapping = &tables.mapping_table[location.mapping_index as usize];
        let lines = location.lines.iter().map(|line| {
            let function = &tables.function_table[line.function_index as usize];
            (string(function.name_strindex), string(function.filename_strindex), line.line)
        });
        let (lines, file): (Vec<_>, _) = (lines.collect(), string(mapping.filename_strindex));
        format!(
            "{lines:?} {file} {:x} {:?}",
            location.address,
            attributes(&location.attribute_indices)
        )
    };
    let samples = profile.samples.iter().map(|sample| {
        let stack = &tables.stack_table[sample.stack_index as usize];
        let stack: Vec<_> = stack.location_indices.iter().map(location).collect();
        let link = &tables.link_table[sample.link_index as usize];
        let attributes = attributes(&sample.attribute_indices);
        let (values, times) = (&sample.values, &sample.timestamps_unix_nano);
        format!("{stack:?} {link:?} {attributes:?} {values:?} {times:?}")
    });
    format!(
        "{} {} {} {:?} {:?} {:?} {:?}",
        profile.time_unix_nano,
        profile.duration_nano,
        profile.period,
        kind(&profile.sample_type),
        kind(&profile.period_type),
        attributes(&profile.attribute_indices),
        samples.collect::<Vec<_>>()
    )
}

/// An attribute of a request's resource.
pub(crate) fn resource_attribute(got: &Got, key: &str) -> Option<String> {
    let resource = got.message.resource_profiles[0].resource.as_ref()?;
    let found = resource.attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => Some(text.clone()),
        _ => None,
    }
}

impl Shared {
    fn take(
        &self,
        path: &str,
        headers: &HeaderMap,
        message: ExportProfilesServiceRequest,
    ) -> Behavior {
        let then = || lock(&self.then).clone().unwrap_or(Behavior::Accept(0));
        let behavior = lock(&self.script).pop_front().unwrap_or_else(then);
        let headers = headers
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
            .collect();
        let is_accepted =
            matches!(behavior, Behavior::Accept(_) | Behavior::Hold | Behavior::Respond(_));
        let at = Instant::now();
        lock(&self.got).push(Got { at, path: path.to_owned(), headers, message, is_accepted });
        self.came.notify_all();
        behavior
    }
}

fn accepted(rejected: i64) -> ExportProfilesServiceResponse {
    let error_message = if rejected > 0 { "too old" } else { "" }.to_owned();
    let partial = ExportProfilesPartialSuccess { rejected_profiles: rejected, error_message };
    ExportProfilesServiceResponse { partial_success: Some(partial) }
}

async fn by_http(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut bytes = Vec::new();
    match headers.get("content-encoding").map(|encoding| encoding.to_str().unwrap()) {
        None => bytes.extend(&body),
        Some("gzip") => {
            _ = flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut bytes).unwrap();
        }
        Some(other) => panic!("{other}"),
    }
    let message = ExportProfilesServiceRequest::decode(&bytes[..]).unwrap();
    match shared.take(uri.path(), &headers, message) {
        Behavior::Accept(rejected) => accepted(rejected).encode_to_vec().into_response(),
        Behavior::Refuse(status, after) => {
            let after = after.map(|after| [("retry-after", after.as_secs().to_string())]);
            (
                StatusCode::from_u16(status).unwrap(),
                after.map_or([("x", String::new())], |a| a),
                "on purpose",
            )
                .into_response()
        }
        Behavior::Hang => std::future::pending().await,
        Behavior::Respond(bytes) => bytes.into_response(),
        Behavior::Hold => {
            shared.released.notified().await;
            accepted(0).encode_to_vec().into_response()
        }
    }
}

struct ByGrpc(Arc<Shared>);

#[tonic::async_trait]
impl ProfilesService for ByGrpc {
    async fn export(
        &self,
        request: tonic::Request<ExportProfilesServiceRequest>,
    ) -> Result<tonic::Response<ExportProfilesServiceResponse>, Status> {
        let (metadata, _, message) = request.into_parts();
        match self.0.take("/", &metadata.into_headers(), message) {
            Behavior::Accept(rejected) => Ok(tonic::Response::new(accepted(rejected))),
            Behavior::Refuse(status, after) => {
                let code = match status {
                    400 | 413 => Code::InvalidArgument,
                    401 => Code::Unauthenticated,
                    404 => Code::Unimplemented,
                    429 => Code::ResourceExhausted,
                    500 => Code::Internal,
                    _ => Code::Unavailable,
                };
                Err(match after {
                    None => Status::new(code, "on purpose"),
                    Some(after) => {
                        let details = ErrorDetails::with_retry_info(Some(after));
                        Status::with_error_details(code, "on purpose", details)
                    }
                })
            }
            Behavior::Hang => std::future::pending().await,
            Behavior::Respond(bytes) => {
                let message = String::from_utf8_lossy(bytes).into_owned();
                let partial =
                    ExportProfilesPartialSuccess { error_message: message, ..Default::default() };
                Ok(tonic::Response::new(ExportProfilesServiceResponse {
                    partial_success: Some(partial),
                }))
            }
            Behavior::Hold => {
                self.0.released.notified().await;
                Ok(tonic::Response::new(accepted(0)))
            }
        }
    }
}

/// Certificates and their authority, as PEM.
pub(crate) struct Certified {
    pub(crate) authority: String,
    pub(crate) server: Identity,
    pub(crate) client: (String, String),
}

/// Creates certificates of one authority for a server at 127.0.0.1 and for a client.
pub(crate) fn certify() -> Certified {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let certificate = authority.self_signed(&key).unwrap();
    let issuer = rcgen::Issuer::new(authority, key);
    let sign = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let signed = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        (signed.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem())
    };
    let (server, server_key) = sign("127.0.0.1");
    Certified {
        authority: certificate.pem(),
        server: Identity::from_pem(server, server_key),
        client: sign("shop"),
    }
}
