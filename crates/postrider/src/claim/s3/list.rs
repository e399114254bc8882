//! The answer to a request for a list. Little XML, of a fixed shape, of which two elements are read.

use chrono::{DateTime, Utc};

use super::Object;

/// The objects of a `ListBucketResult`.
pub(super) fn read(body: &[u8]) -> Option<Vec<Object>> {
    let body = std::str::from_utf8(body).ok().filter(|body| body.contains("<ListBucketResult"))?;
    let contents = body.split("<Contents>").skip(1);
    contents
        .map(|entry| {
            let path = plain(element(entry, "Key")?);
            let stored = DateTime::parse_from_rfc3339(element(entry, "LastModified")?).ok()?.with_timezone(&Utc);
            Some(Object { path, stored })
        })
        .collect()
}

/// What stands between the first `<name>` and its end.
pub(super) fn element<'x>(xml: &'x str, name: &str) -> Option<&'x str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
}

/// Keys of ours have no such characters, but others may lie beside them.
fn plain(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
    text.replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read() {
        let body = br#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix></Prefix><KeyCount>2</KeyCount>
<Contents><Key>2023-11-14/x</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified><ETag>&quot;1&quot;</ETag></Contents>
<Contents><LastModified>2023-11-14T22:13:20Z</LastModified><Key>a&amp;lt;b</Key></Contents></ListBucketResult>"#;
        let stored = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        let object = |path: &str| Object { path: path.to_owned(), stored };
        assert_eq!(read(body), Some(vec![object("2023-11-14/x"), object("a&lt;b")]));
        assert_eq!(read(b"<ListBucketResult/>"), Some(Vec::new()));
    }

    #[test]
    fn anything_else_is_no_list() {
        for body in ["", "<html>", "<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>"] {
            assert_eq!(read(body.as_bytes()), None, "{body}");
        }
    }
}
