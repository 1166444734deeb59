//! A program that uses rustls as its documentation says, and a layer that exports over `https`.

use tracing_profiling::OtlpExporter;

fn exporter(endpoint: &str) -> Result<OtlpExporter, tracing_profiling::Error> {
    Ok(OtlpExporter::builder().endpoint(endpoint).build()?)
}

fn main() {
    let https = "https://127.0.0.1:1";
    // Without `https` there is nothing to choose.
    exporter("http://127.0.0.1:1").expect("no TLS");
    match exporter(https) {
        Ok(_) => println!("exports before the host has a provider"),
        Err(error) => println!("{error}"),
    }
    // The layer has chosen nothing for the program.
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    // It panics if rustls has two providers.
    let host = rustls::ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
    _ = host.with_no_client_auth();
    exporter(https).expect("the provider of the process");
    println!("exports with the provider of the host");
}
