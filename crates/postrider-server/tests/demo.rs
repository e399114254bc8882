//! `postrider demo --exit`: the proof, from outside.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::process::{Command, Stdio};

#[test]
fn demo_survives_its_crashes_and_proves_it() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_postrider"))
        .args(["demo", "--exit", "--events", "1000", "--json", "--dir"])
        .arg(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);

    let proof: serde_json::Value = serde_json::from_str(&out).expect("stdout is the proof and nothing else");
    assert_eq!(proof["holds"], true, "{out}");
    assert_eq!(proof["committed"], 1000);
    assert!(proof["rolled_back"].as_u64().unwrap() > 0, "{out}");
    for group in proof["groups"].as_array().unwrap() {
        assert_eq!(group["applied"], 1000, "{out}");
        for figure in ["lost", "doubled", "reordered", "phantom"] {
            assert_eq!(group[figure], 0, "{figure}: {out}");
        }
    }
    let killed: Vec<&str> =
        proof["takeovers"].as_array().unwrap().iter().filter_map(|t| t["killed"].as_str()).collect();
    assert!(killed[0].starts_with("relay") && killed[1].starts_with("billing"), "{out}");
    assert!(err.contains("killed with SIGKILL") && err.contains("took over after"), "{err}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the demo leaves nothing behind");
}
