//! Which OTLP Profiles this crate speaks. A break of the protocol changes this file, the encoder and `Cargo.toml`.

macro_rules! package {
    () => {
        "v1development"
    };
}

pub(crate) use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceResponse;

/// The number of the format, which each request states in the header: formats that differ have the same package. Without
/// it, receivers assume 1.
pub(crate) const DEVELOPMENT_VERSION: &str = "1";
pub(crate) const DEVELOPMENT_VERSION_HEADER: &str = "otlp-profiles-development-version";
/// Below the base URL of a receiver.
pub(crate) const HTTP_PATH: &str = concat!("/", package!(), "/profiles");
#[cfg(feature = "grpc")]
pub(crate) const GRPC_METHOD: &str =
    concat!("/opentelemetry.proto.collector.profiles.", package!(), ".ProfilesService/Export");

#[cfg(all(test, feature = "grpc"))]
mod tests {
    use std::any::type_name;

    use opentelemetry_proto::tonic::collector::profiles::v1development::profiles_service_server::SERVICE_NAME;
    use prost::Message;

    use super::*;
    use tracing_profiling_profile::encode::otlp_messages as messages;

    /// Everything that names the version names that of the messages.
    #[test]
    fn paths_and_messages_have_one_version() {
        assert_eq!(GRPC_METHOD, format!("/{SERVICE_NAME}/Export"));
        assert_eq!(HTTP_PATH, format!("/{}/profiles", package!()));
        for module in
            [type_name::<messages::Profile>(), type_name::<ExportProfilesServiceResponse>()]
        {
            assert!(module.contains(concat!("::profiles::", package!(), "::")), "{module}");
        }
    }

    /// A sample of format 1, as of v1.10 of the protocol: an increment of the version goes with other bytes.
    #[test]
    fn the_version_is_that_of_the_encoded_fields() {
        let sample = messages::Sample {
            stack_index: 1,
            attribute_indices: vec![2],
            link_index: 3,
            values: vec![4],
            timestamps_unix_nano: vec![5],
        };
        let fields: [&[u8]; 5] = [
            &[0x08, 1],
            &[0x12, 1, 2],
            &[0x18, 3],
            &[0x22, 1, 4],
            &[0x2a, 8, 5, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!((DEVELOPMENT_VERSION, sample.encode_to_vec()), ("1", fields.concat()));
    }

    #[test]
    fn the_guide_has_the_version() {
        let package = format!("`opentelemetry.proto.profiles.{}`", package!());
        let pages = [
            (include_str!("../../../docs/guide/otlp.md"), [&*package, HTTP_PATH]),
            (include_str!("../../../docs/otlp.md"), [&*package, DEVELOPMENT_VERSION_HEADER]),
            (include_str!("../../../docs/guide/receivers.md"), [HTTP_PATH; 2]),
        ];
        for (page, texts) in pages {
            for text in texts {
                assert!(page.contains(text), "{text}");
            }
        }
    }
}
