//! What is shipped in `ops/` is checked by the program that will read it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[track_caller]
fn promtool(folder: &Path, args: &[&str]) -> String {
    let ran = Command::new("promtool").args(args).current_dir(folder).output();
    let ran = ran.expect("promtool is installed by scripts/setup.sh (Debian's package prometheus)");
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "promtool {args:?}: {said}");
    said
}

/// The metrics that a text names.
fn names(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c: char| !is_name(c)).filter(|word| word.starts_with("postrider_"));
    words.map(str::to_owned).collect()
}

/// The page has a histogram under its own name; a query asks for its parts.
fn is_documented(name: &str, documented: &BTreeSet<String>) -> bool {
    let parts = ["_bucket", "_sum", "_count"];
    documented.contains(name)
        || parts.iter().any(|part| name.strip_suffix(part).is_some_and(|whole| documented.contains(whole)))
}

fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|field| expressions(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

#[test]
fn alert_rules_are_valid_and_each_fires_and_resolves() {
    let folder = root().join("ops/prometheus");
    let said = promtool(&folder, &["check", "rules", "alerts.yml"]);
    let (rules, tests) = (read("ops/prometheus/alerts.yml"), read("ops/prometheus/alerts_test.yml"));
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(said.contains(&format!("{} rules found", alerts.len())), "{said}");
    promtool(&folder, &["test", "rules", "alerts_test.yml"]);
    let page = read("docs/reference/metrics.md");
    for alert in alerts {
        let fires = tests.match_indices(&format!("alertname: {alert}\n")).count();
        let resolves = tests.match_indices(&format!("alertname: {alert}, exp_alerts: []")).count();
        assert!(fires > 0 && resolves > 0, "{alert} fires in {fires} tests and resolves in {resolves}");
        assert!(page.contains(&format!("`{alert}`")), "{alert} is not in docs/reference/metrics.md");
    }
}

#[test]
fn rules_and_dashboard_ask_only_for_metrics_that_there_are() {
    let documented = names(&read("docs/reference/metrics.md"));
    for path in ["ops/prometheus/alerts.yml", "ops/prometheus/alerts_test.yml", "ops/grafana/postrider.json"] {
        let used = names(&read(path));
        assert!(used.len() > 5, "{path} asks for {used:?}");
        for name in used {
            assert!(is_documented(&name, &documented), "{path} asks for {name}, which docs/reference/metrics.md lacks");
        }
    }
}

#[test]
fn every_expression_of_the_dashboard_is_valid() {
    let dashboard: Value = serde_json::from_str(&read("ops/grafana/postrider.json")).expect("the dashboard is JSON");
    let mut found = Vec::new();
    expressions(&dashboard, &mut found);
    assert!(found.len() > 20, "{found:?}");
    let rules = found.iter().enumerate().map(|(number, expression)| {
        let expression = expression.replace("$__rate_interval", "5m");
        assert!(!expression.contains("$__"), "{expression}");
        serde_json::json!({ "record": format!("panel:{number}"), "expr": expression })
    });
    let rules = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules.collect::<Vec<_>>() }] });
    let folder = tempfile::tempdir().expect("a folder");
    // JSON is YAML.
    std::fs::write(folder.path().join("rules.yml"), rules.to_string()).expect("written");
    let said = promtool(folder.path(), &["check", "rules", "rules.yml"]);
    assert!(said.contains(&format!("{} rules found", found.len())), "{said}");
}
