//! What the documentation tells people to type is what the program takes.

use std::path::{Path, PathBuf};

use crate::harness::Place;

#[test]
fn every_command_in_the_documentation_exists() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut pages = vec![root.join("README.md")];
    for folder in ["docs/guides", "docs/operations"] {
        pages.extend(std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    let place = Place::new();
    let mut count = 0;
    for page in pages.iter().filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
        for command in commands(page) {
            // Asked for help, the program looks at what stands before and does nothing.
            let arguments: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
            let ran = place.run(&arguments);
            assert_eq!(ran.code, 0, "{}: {}: {}", page.display(), command.join(" "), ran.stderr);
            count += 1;
        }
    }
    assert!(count > 40, "only {count} commands were found");
}

/// The arguments of every line of code that begins with the program's name.
fn commands(page: &Path) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(page).unwrap();
    let mut is_fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        let is_code = is_fenced || line.starts_with("    ");
        // `postrider = {…}` is a dependency; two spaces are a row of a table that was printed.
        if let (true, Some(rest)) = (is_code, line.trim_start().strip_prefix("postrider "))
            && !rest.starts_with(['=', ' '])
        {
            found.push(words(rest));
        }
    }
    found
}

/// A line cut into words as a shell does it, up to a comment, a pipe or a redirection.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for char in line.chars() {
        match (quote, char) {
            (Some(open), close) if open == close => quote = None,
            (None, '\'' | '"') => quote = Some(char),
            (None, ' ') => words.push(String::new()),
            _ => words.last_mut().unwrap().push(char),
        }
    }
    let ends = |word: &String| matches!(word.as_str(), "#" | "|" | ">" | ">>" | "<" | "&" | "&&" | "\\");
    words.into_iter().filter(|word| !word.is_empty()).take_while(|word| !ends(word)).collect()
}
