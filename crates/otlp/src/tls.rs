//! TLS: certificates, and who does the cryptography.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tracing_profiling_profile::export::InvalidSetting;

use crate::settings::{CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY, File, Protocol, Settings};

/// A larger file is not a certificate.
const MOST_BYTES: u64 = 1024 * 1024;
/// The variable for OpenSSL's certificate file, which the loader of system certificates also uses.
const SYSTEMS: &str = "SSL_CERT_FILE";

/// The configuration for `https`. Other schemes need none, and no cryptography.
pub(crate) fn client_config(settings: &Settings) -> Result<Option<ClientConfig>, InvalidSetting> {
    let mut roots = None;
    if let Some(file) = &settings.certificate {
        let trusted = roots.insert(RootCertStore::empty());
        for certificate in certificates(file)? {
            trusted.add(certificate).map_err(|error| wrong(file, error))?;
        }
    }
    let identity = match (&settings.client_certificate, &settings.client_key) {
        (None, None) => None,
        (Some(file), Some(key_file)) => {
            let certificates = certificates(file)?;
            let key = read(&key_file.path).map_err(pem::Error::Io);
            let key = key.and_then(|key| PrivateKeyDer::from_pem_slice(&key));
            let key = key.map_err(|error| unreadable(key_file, &error))?;
            Some((certificates, key, key_file))
        }
        (Some(file), None) => {
            let problem = format!("its key is missing: set {} too", CLIENT_KEY.all);
            return Err(wrong(file, problem));
        }
        (None, Some(file)) => {
            let problem = format!("its certificate is missing: set {} too", CLIENT_CERTIFICATE.all);
            return Err(wrong(file, problem));
        }
    };
    let is_https = settings.uri.scheme_str() == Some("https");
    is_https.then(|| config(settings, roots, identity)).transpose()
}

/// The cryptography that the program has chosen for its process, otherwise the one that a feature of this crate brings.
/// The process' default is not set: that is the program's, and rustls can choose it by itself as long as only one is
/// compiled in.
fn provider() -> Option<Arc<CryptoProvider>> {
    let chosen = CryptoProvider::get_default().cloned();
    #[cfg(feature = "tls-aws-lc")]
    let chosen = chosen.or_else(|| Some(Arc::new(rustls::crypto::aws_lc_rs::default_provider())));
    #[cfg(feature = "tls-ring")]
    let chosen = chosen.or_else(|| Some(Arc::new(rustls::crypto::ring::default_provider())));
    chosen
}

/// The client configuration. The system's certificates are read only if they are needed.
fn config(
    settings: &Settings,
    roots: Option<RootCertStore>,
    identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, &File)>,
) -> Result<ClientConfig, InvalidSetting> {
    let provider = provider().ok_or_else(|| {
        let problem = "https needs a cryptographic provider: enable the feature `otlp-tls-ring` or `otlp-tls-aws-lc` \
            of tracing-profiling (the one that the program's rustls has, if it has one), or install one before the \
            layer is built: `rustls::crypto::ring::default_provider().install_default()`";
        InvalidSetting::unusable("the endpoint", &settings.shown_endpoint(), problem)
    })?;
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder
        .map_err(|error| InvalidSetting::unusable("the TLS configuration", "default", error))?;
    let builder = match roots {
        Some(roots) => builder.with_root_certificates(roots),
        None => {
            systems_is_readable().and_then(|()| builder.with_native_roots()).map_err(|error| {
                let problem =
                    format!("{error}; set it to a PEM file with the certificates to trust");
                InvalidSetting::unusable(CERTIFICATE.all, "not set", problem)
            })?
        }
    };
    let mut config = match identity {
        Some((certificates, key, key_file)) => builder
            .with_client_auth_cert(certificates, key)
            .map_err(|error| wrong(key_file, error))?,
        None => builder.with_no_client_auth(),
    };
    if settings.protocol == Protocol::Grpc {
        config.alpn_protocols = vec![b"h2".to_vec()];
    }
    Ok(config)
}

/// All certificates in a file; there must be at least one.
fn certificates(file: &File) -> Result<Vec<CertificateDer<'static>>, InvalidSetting> {
    let text = read(&file.path).map_err(|error| unreadable(file, &pem::Error::Io(error)))?;
    match CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>() {
        Ok(found) if found.is_empty() => Err(unreadable(file, &pem::Error::NoItemsFound)),
        Ok(found) => Ok(found),
        Err(error) => Err(unreadable(file, &error)),
    }
}

/// Reads a regular file.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Checked before opening, which could block on a FIFO.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = Vec::new();
    fs::File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    Ok(text)
}

/// Checks that the system's certificate file, if set by the variable, is a regular file, too.
fn systems_is_readable() -> io::Result<()> {
    let Some(path) = std::env::var_os(SYSTEMS) else { return Ok(()) };
    match fs::metadata(path) {
        Ok(file) if !file.is_file() => {
            Err(io::Error::other(format!("{SYSTEMS} is not a regular file")))
        }
        _ => Ok(()),
    }
}

fn unreadable(file: &File, error: &pem::Error) -> InvalidSetting {
    let problem = match error {
        pem::Error::NoItemsFound => "the file contains no PEM item of that kind".to_owned(),
        pem::Error::Io(error) => format!("it cannot be read: {error}"),
        error => format!("it cannot be read: {error:?}"),
    };
    wrong(file, problem)
}

fn wrong(file: &File, problem: impl fmt::Display) -> InvalidSetting {
    InvalidSetting::unusable(file.name, &file.path.display().to_string(), problem)
}
