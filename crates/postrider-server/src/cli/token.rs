//! `postrider token`: makes a token for HTTP.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::failure::Result;
use super::output;
use crate::access::{self, Hash, Role};

/// Arguments of `token`.
#[derive(Debug, Args)]
#[command(after_help = "\
The token is shown once; the configuration keeps its SHA-256. Remove the section and start again, and the token and its
sessions are worth nothing.

Examples:
  postrider token new --name ops --role operator
  postrider token new --name shop --role producer >> postrider.toml")]
pub struct TokenArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a token, and the section that the configuration needs
    New {
        /// Who gets it; stands in the audit table
        #[arg(long, value_parser = name)]
        name: String,
        /// What it may do
        #[arg(long)]
        role: RoleArg,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Look at everything but payloads
    Viewer,
    /// Everything
    Operator,
    /// Post events, and nothing else
    Producer,
}

fn name(text: &str) -> std::result::Result<String, String> {
    match crate::config::is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("use 1 to 60 letters, digits, '-' or '_'".to_owned()),
    }
}

/// Makes it. The section goes to stdout, the token to stderr: what is redirected into a file is not the secret.
pub fn run(args: TokenArgs) -> Result<ExitCode> {
    #[derive(Serialize)]
    struct Made<'a> {
        name: &'a str,
        role: Role,
        token: &'a str,
        hash: String,
    }
    let Verb::New { name, role, json } = args.verb;
    let role = match role {
        RoleArg::Viewer => Role::Viewer,
        RoleArg::Operator => Role::Operator,
        RoleArg::Producer => Role::Producer,
    };
    let token = access::new_token()?;
    let hash = Hash::of(&token).to_string();
    if json {
        output::json(&Made { name: &name, role, token: &token, hash })?;
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("The token, shown this once:\n\n  {token}\n\nFor the configuration:\n");
    output::line(&format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\nhash = \"{hash}\""))?;
    Ok(ExitCode::SUCCESS)
}
