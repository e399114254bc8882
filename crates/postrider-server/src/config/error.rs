//! Mistakes in the configuration, shown at their place.

use std::fmt;
use std::path::PathBuf;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::settings::Origin;
use super::url::mask;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    origin: Origin,
    message: String,
    label: String,
    help: Option<String>,
}

impl Problem {
    /// A mistake that names the key and what is wrong with it, without the value.
    pub fn new(origin: Origin, message: impl Into<String>) -> Self {
        Self { origin, message: message.into(), label: String::new(), help: None }
    }

    /// A word or two under the place in the file.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// What was probably meant.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// All mistakes of one configuration.
#[derive(Debug, Clone)]
pub struct Problems {
    /// The file's path and text.
    file: Option<(PathBuf, String)>,
    problems: Vec<Problem>,
}

impl Problems {
    /// The mistakes, and the file that places refer to. Passwords in its URLs are masked here, once and for all.
    pub fn new(file: Option<(PathBuf, String)>, mut problems: Vec<Problem>) -> Self {
        // As they stand in the file, then those of the environment.
        problems.sort_by_key(|problem| match &problem.origin {
            Origin::Default => (0, 0),
            Origin::File(span) => (1, span.start),
            Origin::Env(_) => (2, 0),
        });
        Self { file: file.map(|(path, text)| (path, mask(&text))), problems }
    }

    /// All mistakes as text, in colour when `is_styled`.
    pub fn render(&self, is_styled: bool) -> String {
        let renderer = if is_styled { Renderer::styled() } else { Renderer::plain() };
        let reports: Vec<String> =
            self.problems.iter().map(|problem| renderer.render(&[self.group(problem)])).collect();
        reports.join("\n\n")
    }

    fn group<'a>(&'a self, problem: &'a Problem) -> Group<'a> {
        let title = match &problem.origin {
            Origin::Env(name) => format!("environment variable {name}: {}", problem.message),
            Origin::File(_) | Origin::Default => problem.message.clone(),
        };
        let mut group = Group::with_title(Level::ERROR.primary_title(title));
        if let (Origin::File(span), Some((path, text))) = (&problem.origin, &self.file) {
            let annotation = AnnotationKind::Primary.span(span.clone()).label(problem.label.as_str());
            group = group.element(Snippet::source(text.as_str()).path(path.to_string_lossy()).annotation(annotation));
        }
        if let Some(help) = &problem.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        group
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Problems {}

/// The candidate that a misspelt word most likely meant, if one is near enough.
pub fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    // Below this likeness a suggestion is a guess that misleads.
    const LIKENESS_MIN: f64 = 0.7;
    let word = word.to_ascii_lowercase();
    candidates
        .iter()
        .map(|candidate| (strsim::jaro_winkler(&word, candidate), *candidate))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
