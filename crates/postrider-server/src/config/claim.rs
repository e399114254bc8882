//! `[claim_check]`: where large payloads go.

use std::path::PathBuf;

use postrider::claim::is_path;
use postrider::event::PAYLOAD_BYTES_MAX;

use super::Hidden;
use super::settings::Settings;

/// `[claim_check]`, when it is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimConfig {
    /// Which storage.
    pub url: ClaimUrl,
    /// The largest payload that travels with its event.
    pub above_bytes: usize,
    /// The S3 server; none for Amazon's.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: String,
    /// The id of the access key.
    pub access_key: Hidden,
    /// The secret access key.
    pub secret_key: Hidden,
}

/// Which storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimUrl {
    /// A folder.
    Folder(PathBuf),
    /// A part of a bucket.
    S3 {
        /// The bucket's name.
        bucket: String,
        /// What paths begin with; may be empty.
        prefix: String,
    },
}

impl ClaimUrl {
    /// Reads the setting; the error says what was meant, without the value. Empty means none.
    pub fn parse(url: &str) -> Result<Option<Self>, String> {
        if url.is_empty() {
            return Ok(None);
        }
        if let Some(path) = url.strip_prefix("file:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path.contains('?') {
                return Err("names no folder; write \"file:///var/lib/postrider/claims\"".to_owned());
            }
            return Ok(Some(ClaimUrl::Folder(PathBuf::from(path))));
        }
        let Some(rest) = url.strip_prefix("s3://") else {
            return Err("must begin with \"file:\" or \"s3://\", or be empty".to_owned());
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        if !is_path(bucket) || (!prefix.is_empty() && !is_path(prefix)) {
            return Err("must be s3://bucket or s3://bucket/prefix, of letters, digits, '-', '_' and '.'".to_owned());
        }
        Ok(Some(ClaimUrl::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() }))
    }
}

/// Reads the section. The outer `None` is a mistake, the inner one is "off".
pub(super) fn read(settings: &mut Settings, payload_bytes_max: Option<usize>) -> Option<Option<ClaimConfig>> {
    let above_bytes = settings.integer("claim_check.above_bytes", 1..=PAYLOAD_BYTES_MAX as u64);
    let above_bytes = usize::try_from(above_bytes).unwrap_or(PAYLOAD_BYTES_MAX);
    let endpoint = settings.parsed("claim_check.endpoint", |text| {
        let is_address =
            (text.starts_with("http://") || text.starts_with("https://")) && !text.contains(['@', '?', '#']);
        match text {
            "" => Ok(None),
            text if is_address => Ok(Some(text.to_owned())),
            _ => Err("must be empty, or scheme, host and port such as \"http://minio:9000\", without a user"),
        }
    });
    let Some(url) = settings.parsed("claim_check.url", ClaimUrl::parse)? else { return Some(None) };
    if let Some(max) = payload_bytes_max
        && above_bytes > max
    {
        settings.complain(
            "claim_check.above_bytes",
            "is above broker.payload_bytes_max, so some sizes could not go",
            None,
        );
    }
    if matches!(url, ClaimUrl::S3 { .. }) {
        for key in ["claim_check.region", "claim_check.access_key", "claim_check.secret_key"] {
            if settings.text(key).is_empty() {
                settings.complain(key, "is empty, but claim_check.url names S3", None);
            }
        }
    }
    let hidden = |key: &str| Hidden::new(settings.text(key));
    Some(Some(ClaimConfig {
        url,
        above_bytes,
        endpoint: endpoint?,
        region: settings.text("claim_check.region"),
        access_key: hidden("claim_check.access_key"),
        secret_key: hidden("claim_check.secret_key"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_their_storage() {
        assert_eq!(ClaimUrl::parse(""), Ok(None));
        assert_eq!(ClaimUrl::parse("file:///var/claims"), Ok(Some(ClaimUrl::Folder("/var/claims".into()))));
        assert_eq!(ClaimUrl::parse("file:./claims"), Ok(Some(ClaimUrl::Folder("./claims".into()))));
        for wrong in ["file:", "file://", "/var/claims", "http://x", "s3://", "s3://b/../x", "s3://b/a b", "s3:///x"] {
            assert!(ClaimUrl::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_bucket_may_have_a_prefix() {
        let s3 = |prefix: &str| ClaimUrl::S3 { bucket: "claims".to_owned(), prefix: prefix.to_owned() };
        assert_eq!(ClaimUrl::parse("s3://claims"), Ok(Some(s3(""))));
        assert_eq!(ClaimUrl::parse("s3://claims/shop/orders/"), Ok(Some(s3("shop/orders"))));
    }
}
