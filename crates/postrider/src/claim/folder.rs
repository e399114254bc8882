//! Objects as files of a local or mounted folder.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;

use super::{Hash, Object, Objects};
use crate::error::{Error, Kind, Result};

/// A folder. It must exist: one that is missing may be a share that is not mounted, and is not created in its place.
///
/// A file is written under a name that begins with a dot, synced, and then renamed, so that nobody reads half of one,
/// also after a power cut.
#[derive(Debug, Clone)]
pub struct Folder {
    root: PathBuf,
}

impl Folder {
    /// Objects below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Runs a call of the file system where it may take its time.
    async fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let root = self.root.clone();
        let result = tokio::task::spawn_blocking(move || {
            // Without this, everything in a folder that is gone would look as if it alone were missing.
            fs::metadata(&root)?;
            work(&root)
        });
        result.await.map_err(crate::task::ended)?.map_err(|error| classify(doing, error))
    }
}

#[async_trait]
impl Objects for Folder {
    async fn put(&self, path: &str, content: Bytes, _hash: &Hash) -> Result<()> {
        let parts = parts(path)?;
        self.run("an object cannot be stored", move |root| write(root, &parts, &content)).await
    }

    async fn get(&self, path: &str, bytes_max: usize) -> Result<Option<Bytes>> {
        let parts = parts(path)?;
        self.run("an object cannot be read", move |root| read(&root.join(parts), bytes_max)).await
    }

    async fn delete(&self, path: &str) -> Result<()> {
        let parts = parts(path)?;
        let delete = move |root: &Path| {
            let file = root.join(&parts);
            absent(fs::remove_file(&file))?;
            // The day, when this was its last; one that is not empty stays. Who needs it at this moment fails, and makes
            // it again when it tries again.
            if parts.components().count() > 1
                && let Some(day) = file.parent()
            {
                let _ = fs::remove_dir(day);
            }
            Ok(())
        };
        self.run("an object cannot be deleted", delete).await
    }

    async fn list(&self, under: &str, after: &str, limit: usize) -> Result<Vec<Object>> {
        let (under, after) = (under.to_owned(), after.to_owned());
        self.run("objects cannot be listed", move |root| {
            let mut found = Vec::new();
            walk(root, "", &Wanted { under: &under, after: &after, limit }, &mut found)?;
            Ok(found)
        })
        .await
    }

    fn place(&self) -> String {
        format!("file://{}", self.root.display())
    }
}

/// The path as one below the root, whoever wrote it.
fn parts(path: &str) -> Result<PathBuf> {
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    if path.split('/').all(is_part) {
        return Ok(path.split('/').collect());
    }
    Err(Error::new(Kind::Other, "the path of an object leads out of the folder"))
}

fn write(root: &Path, parts: &Path, content: &[u8]) -> io::Result<()> {
    let target = root.join(parts);
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(folder)?;
    let part = folder.join(format!(".{}.{:016x}.part", name.to_string_lossy(), fastrand::u64(..)));
    let written = File::create_new(&part).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&part, &target)) {
        let _ = fs::remove_file(&part);
        return Err(error);
    }
    // The names on the way to it, up to the root.
    for folder in folder.ancestors().take(parts.components().count()) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

fn read(file: &Path, bytes_max: usize) -> io::Result<Option<Bytes>> {
    let Some(file) = absent(File::open(file))? else { return Ok(None) };
    let mut content = Vec::new();
    file.take(bytes_max as u64 + 1).read_to_end(&mut content)?;
    Ok(Some(content.into()))
}

/// None when there is no such file.
fn absent<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

struct Wanted<'a> {
    under: &'a str,
    after: &'a str,
    limit: usize,
}

/// Collects in the order of paths. Only folders on the way are read.
fn walk(folder: &Path, path: &str, wanted: &Wanted<'_>, found: &mut Vec<Object>) -> io::Result<()> {
    let Some(entries) = absent(fs::read_dir(folder))? else { return Ok(()) };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        // What is no text is not ours.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_folder = entry.file_type()?.is_dir();
        names.push((format!("{path}{name}{}", if is_folder { "/" } else { "" }), is_folder, entry));
    }
    names.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    for (path, is_folder, entry) in names {
        if found.len() >= wanted.limit {
            return Ok(());
        }
        if is_folder {
            let is_on_the_way = wanted.under.starts_with(&path) || path.starts_with(wanted.under);
            let may_come_after = wanted.after.starts_with(&path) || path.as_str() > wanted.after;
            if is_on_the_way && may_come_after {
                walk(&entry.path(), &path, wanted, found)?;
            }
        } else if path.starts_with(wanted.under)
            && path.as_str() > wanted.after
            && let Some(data) = absent(entry.metadata())?
        {
            found.push(Object { path, stored: data.modified()?.into() });
        }
    }
    Ok(())
}

/// The one place that knows what the errors of a file system mean.
fn classify(doing: &str, error: io::Error) -> Error {
    let (kind, remedy) = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            (Kind::Missing, "create the folder, or mount what belongs there")
        }
        io::ErrorKind::PermissionDenied => (Kind::Denied, "let Postrider read and write the folder"),
        io::ErrorKind::ReadOnlyFilesystem => (Kind::ReadOnly, "make the folder writable"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            return Error::new(Kind::DiskFull, doing).with_source(error);
        }
        _ => (Kind::Unavailable, "look at the disk or the share; nothing is lost meanwhile"),
    };
    Error::new(kind, doing).with_remedy(remedy).with_source(error)
}

#[cfg(test)]
mod tests;
