//! `opentelemetry.proto.processcontext.v1development`, of OTEP 4719.

use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use prost::Message;

use super::otlp_resource::encode_resource;
use crate::profile::Resource;

/// Without the attributes that are not part of the resource, of which there are none.
#[derive(Clone, PartialEq, Message)]
struct ProcessContext {
    #[prost(message, optional, tag = "1")]
    resource: Option<ProtoResource>,
}

/// What a process publishes of itself.
pub(crate) fn process_context(resource: &Resource) -> Vec<u8> {
    ProcessContext { resource: Some(encode_resource(resource)) }.encode_to_vec()
}
