//! The command line: parse, run one command, print its result or one error.
//!
//! Human output goes to stderr or the terminal, `--json` documents to stdout. Exit codes: 0 done, 1 failed, 2 wrong
//! usage, 3 no feasible plan.
//!
//! Read next: [`args`] (what there is), [`commands`] (one file per command).

mod args;
mod commands;
mod compare;
mod draw;
mod failure;
mod files;
mod loaded;
mod profile;
mod report;
mod show;
mod workload;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    end_quietly_when_nobody_reads();
    say_when_output_fails();
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Plan(a) => commands::plan::run(&a),
        Command::Explain(a) => commands::explain::run(&a),
        Command::Diff(a) => commands::diff::run(&a),
        Command::Check(a) => commands::check::run(&a),
        Command::Verify(a) => commands::verify::run(&a),
        Command::Run(a) => commands::run::run(&a),
        Command::Report(a) => commands::report::run(&a),
        Command::Inspect(a) => commands::inspect::run(&a),
        Command::Clusters(a) => commands::clusters::run(&a),
        Command::Profile(a) => commands::profile::run(&a),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Lets the system end the program when its output is closed (`autoshard clusters | head`); Rust would panic instead.
fn end_quietly_when_nobody_reads() {
    #[cfg(unix)]
    // SAFETY: no other thread runs yet, and the default action is a valid handler.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// A full disk behind stdout is an error of the surroundings, not of the program.
fn say_when_output_fails() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to") {
            // Nothing more can be done when stderr is full, too.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("  × {text}\n").as_bytes());
            std::process::exit(1);
        }
        usual(info);
    }));
}
