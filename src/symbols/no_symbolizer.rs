//! Without the feature `symbols`, profiles have addresses, mappings and build ids.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Missing, SymbolSettings, build_id, module_file};
use crate::profile::{
    FrameKind, Function, Location, MappingId, Profile, SourceLine, Symbolized, Symbols,
};
use crate::redact::Redaction;
use crate::unwind::Module;

#[derive(Debug)]
pub(crate) struct Symbolizer;

impl Symbolizer {
    pub(crate) fn new(_: SymbolSettings) -> Self {
        Self
    }

    #[expect(clippy::unused_self, reason = "as with symbols")]
    pub(crate) fn symbolize(
        &mut self,
        profile: &Profile,
        modules: &HashMap<MappingId, Arc<Module>>,
        redaction: &Redaction,
        most_bytes: usize,
    ) -> Symbolized {
        profile.symbolized(&mut BuildIds(modules), redaction, most_bytes)
    }

    #[expect(clippy::unused_self, reason = "as with symbols")]
    pub(crate) fn holds_what_is_gone(&self) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "as with symbols")]
    pub(crate) fn take_missing(&mut self) -> Vec<Missing> {
        Vec::new()
    }
}

struct BuildIds<'a>(&'a HashMap<MappingId, Arc<Module>>);

impl Symbols for BuildIds<'_> {
    fn build_ids(&mut self, mapping: MappingId) -> Vec<(String, String)> {
        let read = || {
            let module = self.0.get(&mapping).filter(|module| !module.is_vdso)?;
            let loaded = module_file::open_loaded(module).ok()?;
            let hash = build_id::hash(&loaded.file).ok()??;
            Some(("process.executable.build_id.htlhash".to_owned(), hash))
        };
        read().into_iter().collect()
    }

    fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
        let function = Function::named("[kernel]");
        let is_kernel = location.kind == FrameKind::Kernel;
        is_kernel.then(|| (FrameKind::Kernel, vec![SourceLine { function, line: 0, column: 0 }]))
    }
}
