//! The `postrider` binary.

fn main() -> std::process::ExitCode {
    postrider_server::main()
}
