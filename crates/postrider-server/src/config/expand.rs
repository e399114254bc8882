//! `${NAME}` in a text of the config file stands for an environment variable, so that secrets need not be in it.

/// Replaces every `${NAME}`; `$${` becomes `${`. The error says which variable is missing.
///
/// Where the reference stands for user or password of a URL, characters that would end that part (`@ : / ? #` …) are
/// percent-encoded, because passwords from a vault are rarely written for URLs.
pub fn expand(text: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, reference) = rest.split_at(at);
        if let Some(before) = before.strip_suffix('$') {
            out.push_str(before);
            out.push_str("${");
            rest = &reference[2..];
            continue;
        }
        out.push_str(before);
        let Some(end) = reference.find('}') else {
            return Err("has a ${ without its }; write $${ for a plain ${".to_owned());
        };
        let name = &reference[2..end];
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(format!("refers to ${{{name}}}, which is not the name of an environment variable"));
        }
        let value = lookup(name)
            .ok_or_else(|| format!("refers to ${{{name}}}, but the environment variable {name} is not set"))?;
        rest = &reference[end + 1..];
        if out.contains("://") && rest.contains('@') {
            encode_userinfo(&value, &mut out);
        } else {
            out.push_str(&value);
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn encode_userinfo(value: &str, out: &mut String) {
    for (at, byte) in value.bytes().enumerate() {
        // A value that is encoded already stays as it is.
        let is_escape = byte == b'%' && {
            let digits = &value.as_bytes()[at + 1..];
            digits.len() >= 2 && digits[..2].iter().all(u8::is_ascii_hexdigit)
        };
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(&byte);
        if is_plain || is_escape {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::expand;

    fn env(name: &str) -> Option<String> {
        match name {
            "PW" => Some("p@ss:w/rd%".to_owned()),
            "ENCODED" => Some("p%40ss".to_owned()),
            "HOST" => Some("db:5432".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn references_are_replaced() {
        assert_eq!(expand("plain", &env).unwrap(), "plain");
        assert_eq!(expand("postgres://a:${PW}@${HOST}/x", &env).unwrap(), "postgres://a:p%40ss%3Aw%2Frd%25@db:5432/x");
        assert_eq!(expand("postgres://a:${ENCODED}@h/x", &env).unwrap(), "postgres://a:p%40ss@h/x");
        assert_eq!(expand("a$${PW}b", &env).unwrap(), "a${PW}b");
        assert_eq!(expand("${HOST}", &env).unwrap(), "db:5432");
    }

    #[test]
    fn an_unset_variable_is_named() {
        assert!(expand("amqp://u:${NOPE}@h", &env).unwrap_err().contains("NOPE is not set"));
        assert!(expand("x ${PW", &env).unwrap_err().contains("without its }"));
        assert!(expand("x ${a b}", &env).unwrap_err().contains("not the name"));
    }
}
