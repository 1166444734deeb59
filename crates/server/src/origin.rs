//! Protection of the HTTP routes from pages of other sites in a browser.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use tracing_profiling_profile::text::shortened;

use crate::answer::{Failure, bad_request};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// A host in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    /// In lower case, without a trailing dot.
    Name(String),
}

impl Host {
    /// Parses `host`, `host:port`, `[::1]` or `[::1]:port`.
    fn parse(text: &str) -> Option<(Self, Option<u16>)> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']')?;
                let address: Ipv6Addr = address.parse().ok()?;
                (Self::Address(address.to_canonical()), port)
            }
            None => {
                let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
                (Self::name(host)?, port)
            }
        };
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => None,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                Some(digits.parse().ok()?)
            }
            _ => return None,
        };
        Some((host, port))
    }

    fn name(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Some(Self::Address(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let is_sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let is_name = !name.is_empty() && name.bytes().all(is_sound);
        is_name.then(|| Self::Name(name.to_ascii_lowercase()))
    }

    fn is_loopback(&self) -> bool {
        match self {
            Self::Address(address) => address.is_loopback(),
            Self::Name(name) => name == "localhost",
        }
    }
}

/// The hosts for which a router serves requests, in addition to loopback.
#[derive(Clone, Debug)]
pub(crate) struct Hosts(Arc<[Host]>);

impl Hosts {
    /// Ports are ignored, and so are texts that are not a host.
    pub(crate) fn new(hosts: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let host = |text: &str| match text.parse::<Ipv6Addr>() {
            Ok(address) => Some(Host::Address(address.to_canonical())),
            Err(_) => Host::parse(text).map(|(host, _)| host),
        };
        Self(hosts.into_iter().filter_map(|text| host(text.as_ref().trim())).collect())
    }

    fn allow(&self, host: &Host) -> bool {
        host.is_loopback() || self.0.contains(host)
    }
}

/// Refuses requests that a page of another site could have sent.
pub(crate) async fn refuse_foreign(
    State(hosts): State<Hosts>,
    request: Request,
    next: Next,
) -> Response {
    match check(&request, &hosts) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

/// Refuses requests for work that takes seconds, also those of links that any page can follow at will.
pub(crate) async fn refuse_links(request: Request, next: Next) -> Response {
    match foreign_site(request.headers()) {
        None => next.run(request).await,
        Some(site) => foreign("Sec-Fetch-Site", site).into_response(),
    }
}

/// What the browser says of a request from a page of another site.
fn foreign_site(headers: &HeaderMap) -> Option<&HeaderValue> {
    let is_foreign = |site: &&HeaderValue| *site != "same-origin" && *site != "none";
    headers.get_all(SEC_FETCH_SITE).iter().find(is_foreign)
}

/// Whether the response becomes a page of its own, as when a person follows a link to a report.
fn is_link(headers: &HeaderMap) -> bool {
    let is_all = |name: &HeaderName, value: &str| {
        headers.contains_key(name) && headers.get_all(name).iter().all(|it| it == value)
    };
    is_all(&SEC_FETCH_MODE, "navigate") && is_all(&SEC_FETCH_DEST, "document")
}

fn check(request: &Request, hosts: &Hosts) -> Result<(), Failure> {
    let own = own_hosts(request, hosts)?;
    let headers = request.headers();
    // The browser lets only pages of the same origin read a response, but the work would be done.
    let may_be_foreign = request.method().is_safe() && is_link(headers);
    if let Some(site) = foreign_site(headers).filter(|_| !may_be_foreign) {
        return Err(foreign("Sec-Fetch-Site", site));
    }
    for origin in headers.get_all(header::ORIGIN) {
        let is_ours = origin_of(origin).is_some_and(|(host, port, usual)| {
            let is_same = |own: &(Host, Option<u16>)| {
                own.0 == host && own.1.unwrap_or(usual) == port.unwrap_or(usual)
            };
            !own.is_empty() && own.iter().all(is_same)
        });
        if !is_ours {
            return Err(foreign("Origin", origin));
        }
    }
    Ok(())
}

/// The hosts that a request is for, if all are allowed. A foreign name that resolves to this machine would make its
/// pages the same origin as these routes. A request without a host does not come from a browser.
fn own_hosts(request: &Request, hosts: &Hosts) -> Result<Vec<(Host, Option<u16>)>, Failure> {
    let named = request.headers().get_all(header::HOST);
    if named.iter().count() > 1 {
        return Err(bad_request("there is more than one Host header"));
    }
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let allowed = |text: &[u8]| {
        let host = str::from_utf8(text).ok().and_then(Host::parse);
        host.filter(|(host, _)| hosts.allow(host)).ok_or_else(|| {
            let shown = shortened(String::from_utf8_lossy(text));
            let problem = format!(
                "these routes do not serve the host `{shown}`: use localhost, or add the host with \
                 `tracing_profiling_server::router_for`"
            );
            (StatusCode::MISDIRECTED_REQUEST, problem)
        })
    };
    let named = named.iter().map(HeaderValue::as_bytes);
    authority.into_iter().chain(named).map(allowed).collect()
}

/// Host, port, and the default port of the scheme.
fn origin_of(origin: &HeaderValue) -> Option<(Host, Option<u16>, u16)> {
    let (scheme, rest) = origin.to_str().ok()?.split_once("://")?;
    let usual = match scheme.to_ascii_lowercase().as_str() {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let (host, port) = Host::parse(rest)?;
    Some((host, port, usual))
}

fn foreign(header: &str, value: &HeaderValue) -> Failure {
    let shown = shortened(String::from_utf8_lossy(value.as_bytes()));
    let problem = format!(
        "refused: the request came from a page of another origin ({header}: {shown}); a proxy must not change \
         the Host header"
    );
    (StatusCode::FORBIDDEN, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_allowed(host: &str) -> bool {
        let hosts = Hosts::new(["Shop.internal:9999", "10.0.0.7", "fd00::7", "[fd00::8]:1", "a b"]);
        Host::parse(host).is_some_and(|(host, _)| hosts.allow(&host))
    }

    #[test]
    fn loopback_and_named_hosts_are_allowed_with_any_port() {
        for host in [
            "localhost",
            "localhost:9999",
            "LOCALHOST.:1",
            "127.0.0.1",
            "127.255.0.3:65535",
            "[::1]",
            "[0:0:0:0:0:0:0:1]:9999",
            "[::ffff:127.0.0.1]:80",
            "shop.internal",
            "SHOP.Internal.:80",
            "10.0.0.7:9999",
            "[fd00::7]:9999",
            "[fd00::8]",
        ] {
            assert!(is_allowed(host), "{host}");
        }
    }

    #[test]
    fn other_hosts_are_refused() {
        for host in [
            "",
            ".",
            ":9999",
            "evil.example",
            "localhost.evil.example",
            "evil.localhost",
            "localhost@evil.example",
            "evil.example@localhost",
            "user:pass@localhost",
            "localhost:80@evil.example",
            "localhost:",
            "localhost:99999",
            "localhost:80abc",
            "localhost:80:80",
            "localhost..",
            " localhost",
            "localhost ",
            "localhost/evil",
            "localhost\\evil",
            "localhost#",
            "127.0.0.1.evil.example",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "127.0.0.1.",
            "0.0.0.0",
            "::1",
            "[::1",
            "[::1]x",
            "[::1]:",
            "[::1%25lo]",
            "[127.0.0.1]",
            "[::]",
            "10.0.0.8",
            "notshop.internal",
            "shop.internal.evil.example",
            "lo\u{441}alhost",
            "localhost,evil.example",
        ] {
            assert!(!is_allowed(host), "{host}");
        }
    }
}
