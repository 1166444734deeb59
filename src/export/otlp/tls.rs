//! TLS certificates.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

use super::settings::{File, Protocol, Settings};
use crate::error::Error;

/// A larger file is not a certificate.
const MOST_BYTES: u64 = 1024 * 1024;
/// The variable for OpenSSL's certificate file, which the loader of system certificates also uses.
const SYSTEMS: &str = "SSL_CERT_FILE";

/// The client configuration. The system's certificates are read only if they are needed.
pub(super) fn config(settings: &Settings, is_https: bool) -> Result<ClientConfig, Error> {
    // Not the process's default provider: none may be installed.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder =
        builder.map_err(|error| Error::otlp("the TLS configuration", "default", error))?;
    let builder = match &settings.certificate {
        Some(file) => trust(builder, file)?,
        None if is_https => {
            systems_is_readable().and_then(|()| builder.with_native_roots()).map_err(|error| {
                let problem =
                    format!("{error}; set it to a PEM file with the certificates to trust");
                Error::otlp(Settings::CERTIFICATE, "not set", problem)
            })?
        }
        None => builder.with_root_certificates(RootCertStore::empty()),
    };
    let mut config = match (&settings.client_certificate, &settings.client_key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(file), Some(key_file)) => {
            let certificates = certificates(file)?;
            let key = read(&key_file.path).map_err(pem::Error::Io);
            let key = key.and_then(|key| PrivateKeyDer::from_pem_slice(&key));
            let key = key.map_err(|error| unreadable(key_file, &error))?;
            builder
                .with_client_auth_cert(certificates, key)
                .map_err(|error| wrong(key_file, error))?
        }
        (Some(file), None) => {
            let problem = format!("its key is missing: set {} too", Settings::CLIENT_KEY);
            return Err(wrong(file, problem));
        }
        (None, Some(file)) => {
            let problem =
                format!("its certificate is missing: set {} too", Settings::CLIENT_CERTIFICATE);
            return Err(wrong(file, problem));
        }
    };
    if settings.protocol == Protocol::Grpc {
        config.alpn_protocols = vec![b"h2".to_vec()];
    }
    Ok(config)
}

fn trust(
    builder: ConfigBuilder<ClientConfig, WantsVerifier>,
    file: &File,
) -> Result<ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|error| wrong(file, error))?;
    }
    Ok(builder.with_root_certificates(roots))
}

/// All certificates in a file; there must be at least one.
fn certificates(file: &File) -> Result<Vec<CertificateDer<'static>>, Error> {
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

fn unreadable(file: &File, error: &pem::Error) -> Error {
    let problem = match error {
        pem::Error::NoItemsFound => "the file contains no PEM item of that kind".to_owned(),
        pem::Error::Io(error) => format!("it cannot be read: {error}"),
        error => format!("it cannot be read: {error:?}"),
    };
    wrong(file, problem)
}

fn wrong(file: &File, problem: impl fmt::Display) -> Error {
    Error::otlp(file.name, &file.path.display().to_string(), problem)
}
