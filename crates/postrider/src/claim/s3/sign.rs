//! Signatures of requests to S3: AWS Signature Version 4, in headers. Pure.
//!
//! Paths and the names of parameters are plain, so only the values of parameters are escaped.

use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::claim::Hash;
use crate::claim::hash::hex;
use crate::http::reqwest::{Method, Url};

pub(super) struct Credentials {
    pub region: String,
    pub access_key: String,
    pub secret_key: String,
}

/// What is signed of a request.
pub(super) struct Signed<'a> {
    pub method: &'a Method,
    /// Scheme, host and perhaps the beginning of the path.
    pub base: &'a str,
    /// The rest of the path.
    pub path: &'a str,
    /// In the order of the names.
    pub query: &'a [(&'a str, &'a str)],
    /// The hash of the body.
    pub hash: &'a Hash,
    pub at: DateTime<Utc>,
}

/// The headers that are signed, in the order of their names.
const SIGNED: &str = "host;x-amz-content-sha256;x-amz-date";
const ALGORITHM: &str = "AWS4-HMAC-SHA256";

impl Signed<'_> {
    pub fn url(&self) -> String {
        let query = self.escaped();
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{}/{}{mark}{query}", self.base, self.path)
    }

    /// The headers to send, beside `Host`.
    pub fn headers(&self, credentials: &Credentials) -> [(&'static str, String); 3] {
        let (time, hash) = (self.at.format("%Y%m%dT%H%M%SZ").to_string(), self.hash.hex());
        let (host, path) = self.host_and_path();
        let canonical = format!(
            "{}\n{path}\n{}\nhost:{host}\nx-amz-content-sha256:{hash}\nx-amz-date:{time}\n\n{SIGNED}\n{hash}",
            self.method,
            self.escaped(),
        );
        let day = self.at.format("%Y%m%d").to_string();
        let scope = format!("{day}/{}/s3/aws4_request", credentials.region);
        let canonical = Hash::of(canonical.as_bytes()).hex();
        let to_sign = format!("{ALGORITHM}\n{time}\n{scope}\n{canonical}");
        let secret = format!("AWS4{}", credentials.secret_key);
        let key = [day.as_str(), &credentials.region, "s3", "aws4_request"]
            .into_iter()
            .fold(secret.into_bytes(), |key, part| mac(&key, part));
        let signature = hex(&mac(&key, &to_sign));
        let credential = format!("{}/{scope}", credentials.access_key);
        let authorization =
            format!("{ALGORITHM} Credential={credential}, SignedHeaders={SIGNED}, Signature={signature}");
        [("x-amz-content-sha256", hash), ("x-amz-date", time), ("authorization", authorization)]
    }

    /// As the client will send them. A base that is no URL was refused before.
    fn host_and_path(&self) -> (String, String) {
        let Ok(url) = Url::parse(&self.url()) else { return Default::default() };
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        (host, url.path().to_owned())
    }

    fn escaped(&self) -> String {
        let pairs = self.query.iter().map(|(name, value)| format!("{name}={}", escape(value)));
        pairs.collect::<Vec<_>>().join("&")
    }
}

fn escape(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
        out
    })
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    // HMAC takes keys of any length.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return Vec::new() };
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of Amazon's documentation ("Signature Calculations for the Authorization Header").
    fn signature(path: &str, query: &[(&str, &str)]) -> String {
        let credentials = Credentials {
            region: "us-east-1".to_owned(),
            access_key: "AKIAIOSFODNN7EXAMPLE".to_owned(),
            secret_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
        };
        let signed = Signed {
            method: &Method::GET,
            base: "https://examplebucket.s3.amazonaws.com",
            path,
            query,
            hash: &Hash::of(b""),
            at: DateTime::from_timestamp(1_369_353_600, 0).unwrap(),
        };
        let [_, (_, time), (_, authorization)] = signed.headers(&credentials);
        assert_eq!(time, "20130524T000000Z");
        authorization.rsplit('=').next().unwrap().to_owned()
    }

    #[test]
    fn a_list_is_signed_as_amazon_signs_it() {
        assert_eq!(
            signature("", &[("max-keys", "2"), ("prefix", "J")]),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        );
    }

    #[test]
    fn values_are_escaped_and_signed_as_they_are_sent() {
        let query = [("prefix", "a/b c+é"), ("start-after", "~")];
        let hash = Hash::of(b"");
        let signed = Signed {
            method: &Method::GET,
            base: "http://minio:9000/claims",
            path: "",
            query: &query,
            hash: &hash,
            at: DateTime::default(),
        };
        let url = "http://minio:9000/claims/?prefix=a%2Fb%20c%2B%C3%A9&start-after=~";
        assert_eq!(signed.url(), url);
        assert_eq!(Url::parse(url).unwrap().as_str(), url, "the client sends it as it is");
        assert_eq!(signed.host_and_path(), ("minio:9000".to_owned(), "/claims/".to_owned()));
    }
}
