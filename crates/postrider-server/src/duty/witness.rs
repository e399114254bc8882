//! What the relays have published, in a file beside the database: after a restore the database does not know it any more.
//!
//! The file holds a mark for each store and destination. A store is known by its lineage, which dumps and copies bring along:
//! one that was restored at another address is the same, one that was made anew at the same address is not. Instances on one machine may share it; each writes what is newer
//! than what it finds. It is written beside and then renamed, so that a crash leaves the old one or the new one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use postrider::recovery::{Mark, Witness};
use tokio_util::sync::CancellationToken;

use super::Duty;

/// Marks by lineage and destination.
type Marks = BTreeMap<String, BTreeMap<String, Mark>>;

/// The file, and which store's part of it is meant.
#[derive(Debug, Clone)]
pub struct WitnessFile {
    path: PathBuf,
    lineage: String,
}

impl WitnessFile {
    /// The part of the store with this lineage.
    pub fn new(path: PathBuf, lineage: String) -> Self {
        Self { path, lineage }
    }

    fn read(&self) -> std::io::Result<Marks> {
        match std::fs::read(&self.path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Marks::new()),
            Err(error) => Err(error),
        }
    }

    /// What was published to each destination, as far as the file knows. One that cannot be read is told of and counts as
    /// empty: a relay must not stand still because of it.
    pub fn load(&self) -> BTreeMap<String, Mark> {
        let mut marks = self.read().unwrap_or_else(|error| {
            tracing::warn!(error_type = "other", %error, path = %self.path.display(),
                "the witness cannot be read; a restore before this start will not be noticed by it");
            Marks::new()
        });
        marks.remove(&self.lineage).unwrap_or_default()
    }

    /// Writes down what is newer.
    fn save(&self, published: &BTreeMap<String, Mark>) -> std::io::Result<()> {
        // What cannot be read is replaced.
        let mut marks = self.read().unwrap_or_default();
        let ours = marks.entry(self.lineage.clone()).or_default();
        let mut is_news = false;
        for (destination, mark) in published {
            let known = ours.get(destination).map(|known| (known.life, known.id));
            if known.is_none_or(|known| known < (mark.life, mark.id)) {
                ours.insert(destination.clone(), mark.clone());
                is_news = true;
            }
        }
        if !is_news {
            return Ok(());
        }
        let beside = self.path.with_added_extension(std::process::id().to_string());
        std::fs::write(&beside, serde_json::to_vec_pretty(&marks)?)?;
        std::fs::rename(&beside, &self.path)
    }
}

/// Notes every few seconds how far the relays have come.
pub struct WitnessDuty {
    file: WitnessFile,
    witnesses: Vec<(String, Witness)>,
    is_told: bool,
}

impl WitnessDuty {
    /// The witness of each destination.
    pub fn new(file: WitnessFile, witnesses: Vec<(String, Witness)>) -> Self {
        Self { file, witnesses, is_told: false }
    }

    /// Notes until the relays have `ended`, and once more then: they publish while they stop.
    pub async fn run(mut self, ended: CancellationToken) {
        while !ended.is_cancelled() {
            self.run_once().await;
            tokio::select! {
                () = ended.cancelled() => {}
                () = tokio::time::sleep(Self::EVERY) => {}
            }
        }
        self.run_once().await;
    }
}

impl Duty for WitnessDuty {
    /// What is published within it and lost with the database is not noticed.
    const EVERY: Duration = Duration::from_secs(2);

    async fn run_once(&mut self) {
        let marks: BTreeMap<String, Mark> = self
            .witnesses
            .iter()
            .filter_map(|(destination, witness)| Some((destination.clone(), witness.mark()?)))
            .collect();
        let file = self.file.clone();
        let saved = tokio::task::spawn_blocking(move || file.save(&marks)).await.map_err(std::io::Error::other);
        match saved.flatten() {
            Ok(()) => self.is_told = false,
            Err(_) if self.is_told => {}
            Err(error) => {
                self.is_told = true;
                tracing::warn!(error_type = "other", %error, path = %self.file.path.display(),
                    remedy = "make the folder writable, or set relay.witness to another file, or to \"\"",
                    "the witness cannot be written; a restore may go unnoticed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(life: i64, id: i64) -> Mark {
        serde_json::from_value(serde_json::json!({
            "life": life, "id": id, "event_id": "0190a000-0000-7000-8000-000000000001", "at": "2026-11-16T10:00:00Z"
        }))
        .unwrap()
    }

    #[test]
    fn the_newest_of_each_store_and_destination_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("witness");
        let file = |store: &str| WitnessFile::new(path.clone(), store.to_owned());
        let save = |store: &str, mark: Mark| file(store).save(&[("default".to_owned(), mark)].into()).unwrap();
        assert!(file("a").load().is_empty());
        save("a", mark(0, 9));
        save("a", mark(0, 5));
        save("b", mark(0, 1));
        assert_eq!(file("a").load()["default"], mark(0, 9));
        save("a", mark(1, 2));
        assert_eq!(file("a").load()["default"], mark(1, 2), "a later life counts more");
        assert_eq!(file("b").load()["default"], mark(0, 1));
        std::fs::write(&path, "{ no").unwrap();
        assert!(file("a").load().is_empty());
        save("a", mark(1, 3));
        assert_eq!(file("a").load()["default"], mark(1, 3));
    }
}
