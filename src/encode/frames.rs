//! A sample as those formats see it that know no spans, addresses or inlining: names.

use crate::profile::{FrameKind, Line, Location, Profile, Sample};

/// One box of a flame graph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Frame {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// File and line, or the file of code; empty if unknown.
    pub(super) place: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Span,
    Rust,
    Native,
    Kernel,
    Wait,
    Remark,
}

/// The spans of a sample from the outside in, then its functions, the inlined ones too.
pub(super) fn frames(profile: &Profile, sample: &Sample) -> Vec<Frame> {
    let spans = profile.span_path(sample.link).into_iter().map(|name| Frame {
        name: name.to_owned(),
        kind: Kind::Span,
        place: String::new(),
    });
    let locations = profile.stack(sample.stack).iter().rev();
    let locations = locations.filter_map(|id| profile.location(*id));
    spans.chain(locations.flat_map(|location| of_location(profile, location))).collect()
}

fn of_location(profile: &Profile, location: &Location) -> Vec<Frame> {
    let kind = match location.kind {
        FrameKind::Rust => Kind::Rust,
        FrameKind::Native => Kind::Native,
        FrameKind::Kernel => Kind::Kernel,
        FrameKind::Wait => Kind::Wait,
        FrameKind::Remark => Kind::Remark,
    };
    let file = location.mapping.and_then(|id| profile.mapping(id)).map(|m| m.file.as_str());
    if location.lines.is_empty() {
        let name = profile.place_in_code(location);
        return vec![Frame { name, kind, place: file.unwrap_or_default().to_owned() }];
    }
    let frame = |line: &Line| {
        let function = profile.function(line.function)?;
        let source = profile.string(function.file);
        let place = match (source, line.line) {
            ("", _) => file.unwrap_or_default().to_owned(),
            (source, 0) => source.to_owned(),
            (source, line) => format!("{source}:{line}"),
        };
        let place = if location.is_inferred { format!("{place} (inferred)") } else { place };
        Some(Frame { name: profile.string(function.name).to_owned(), kind, place })
    };
    location.lines.iter().rev().filter_map(frame).collect()
}
