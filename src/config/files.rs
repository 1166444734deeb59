//! The directory of profiles that the environment configures.

use std::path::PathBuf;

use crate::export::{Directory, Format};

/// Where files are written if the program sets no exporter, and in which formats.
#[derive(Clone, Debug)]
pub(super) struct FileSettings {
    pub(super) path: PathBuf,
    pub(super) formats: Option<Vec<Format>>,
    /// A variable that sets this.
    pub(super) is_set_by: Option<&'static str>,
}

impl Default for FileSettings {
    fn default() -> Self {
        Self { path: PathBuf::from("profiles"), formats: None, is_set_by: None }
    }
}

impl FileSettings {
    pub(super) fn directory(&self) -> Directory {
        let directory = Directory::new(&self.path);
        self.formats.clone().into_iter().fold(directory, Directory::with_formats)
    }
}

/// Parses names of formats, separated by commas.
pub(super) fn formats(text: &str) -> Option<Vec<Format>> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let formats: Option<Vec<_>> = names.map(|name| name.parse().ok()).collect();
    formats.filter(|formats| !formats.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_a_list_of_names() {
        assert_eq!(formats(" html, folded,"), Some(vec![Format::Html, Format::Folded]));
        assert_eq!((formats("html,pdf"), formats(","), formats("")), (None, None, None));
    }
}
