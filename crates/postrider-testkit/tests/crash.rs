//! The crash run, short enough for every change. `make crash` runs the long one.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

mod own_servers {
    use std::process::Command;

    /// The faults are the same each time; what they hit is not.
    const SEED: &str = "2";

    #[test]
    fn nothing_is_lost_doubled_or_reordered_under_kill_9() {
        run(&["--events", "4000", "--kills", "4", "--broker-restarts", "1", "--store-restarts", "1"]);
    }

    #[test]
    fn the_same_on_the_embedded_broker() {
        run(&["--broker", "embedded", "--events", "2000", "--kills", "3", "--store-restarts", "1", "--freezes", "0"]);
    }

    fn run(arguments: &[&str]) {
        let output = Command::new(env!("CARGO_BIN_EXE_crash"))
            .args(arguments)
            .args(["--seed", SEED, "--deadline-s", "150"])
            .output()
            .expect("the run starts");
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}\n{stderr}\n{stdout}", output.status);
        assert!(stdout.contains("clean"), "{stdout}");
        println!("{stdout}");
    }
}
