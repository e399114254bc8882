use chrono::Utc;

use super::*;

struct Bed {
    objects: Folder,
    root: PathBuf,
}

impl Bed {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("postrider-{name}-{}", uuid::Uuid::now_v7()));
        fs::create_dir(&root).unwrap();
        Self { objects: Folder::new(&root), root }
    }

    async fn put(&self, path: &str, content: &'static str) {
        self.objects.put(path, content.into(), &Hash::of(content.as_bytes())).await.unwrap();
    }

    async fn paths(&self, under: &str, after: &str, limit: usize) -> Vec<String> {
        self.objects.list(under, after, limit).await.unwrap().into_iter().map(|object| object.path).collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

#[tokio::test]
async fn what_is_stored_is_read_until_it_is_deleted() {
    let bed = Bed::new("round");
    bed.put("a/2023-11-14/x", "one").await;
    bed.put("a/2023-11-14/x", "two").await;
    assert_eq!(bed.objects.get("a/2023-11-14/x", 3).await.unwrap().unwrap(), "two");
    assert_eq!(bed.objects.get("a/2023-11-14/x", 1).await.unwrap().unwrap().len(), 2, "one byte too many tells enough");
    assert_eq!(fs::read_dir(bed.root.join("a/2023-11-14")).unwrap().count(), 1, "nothing but the object is left");
    bed.objects.delete("a/2023-11-14/x").await.unwrap();
    bed.objects.delete("a/2023-11-14/x").await.unwrap();
    assert_eq!(bed.objects.get("a/2023-11-14/x", 3).await.unwrap(), None);
    assert!(!bed.root.join("a/2023-11-14").exists(), "an empty day is gone");
}

#[tokio::test]
async fn a_path_never_leaves_the_folder() {
    let bed = Bed::new("out");
    for path in ["../x", "a/../../x", "/etc/passwd", "a//b", ".", "", "a/.."] {
        assert!(bed.objects.get(path, 9).await.is_err(), "{path}");
        assert!(bed.objects.put(path, Bytes::new(), &Hash::of(b"")).await.is_err(), "{path}");
        assert!(bed.objects.delete(path).await.is_err(), "{path}");
    }
}

#[tokio::test]
async fn a_folder_that_is_gone_is_not_an_object_that_is_missing() {
    let bed = Bed::new("gone");
    let gone = Folder::new(bed.root.join("nowhere"));
    let content = Bytes::from_static(b"x");
    for error in [
        gone.get("x", 1).await.unwrap_err(),
        gone.put("x", content, &Hash::of(b"x")).await.unwrap_err(),
        gone.delete("x").await.unwrap_err(),
        gone.list("", "", 1).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), Kind::Missing);
        assert!(!error.kind().belongs_to_event());
    }
    assert!(!bed.root.join("nowhere").exists(), "nobody creates it");
}

#[tokio::test]
async fn a_list_goes_on_where_it_ended() {
    let bed = Bed::new("list");
    for path in ["b/2023-11-15/x", "b/2023-11-14/y", "b/2023-11-14/x", "b.x", "a/2023-11-14/x"] {
        bed.put(path, "").await;
    }
    let all = ["b/2023-11-14/x", "b/2023-11-14/y", "b/2023-11-15/x"];
    assert_eq!(bed.paths("b/", "b/", 9).await, all);
    assert_eq!(bed.paths("b/", "b/", 2).await, all[..2]);
    assert_eq!(bed.paths("b/", all[1], 9).await, all[2..]);
    assert_eq!(bed.paths("", "", 9).await, ["a/2023-11-14/x", "b.x", all[0], all[1], all[2]]);
    assert_eq!(bed.paths("c/", "c/", 9).await, [""; 0]);
    let stored = bed.objects.list("a/", "a/", 1).await.unwrap()[0].stored;
    assert!((Utc::now() - stored).num_seconds().abs() < 60);
}
