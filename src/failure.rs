//! What goes wrong on the command line: one error, with what to do about it, and an exit code.

use std::process::ExitCode;

/// Why a command did not do its work.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
#[error("{what}")]
pub struct Failure {
    /// What, where and why.
    what: String,
    /// What to do.
    #[help]
    help: Option<String>,
    code: u8,
}

impl Failure {
    /// The work failed.
    pub fn new(what: impl std::fmt::Display) -> Failure {
        Failure { what: what.to_string(), help: None, code: 1 }
    }
    /// The command was used wrongly.
    pub fn usage(what: impl std::fmt::Display) -> Failure {
        Failure { code: 2, ..Failure::new(what) }
    }
    /// There is no feasible plan.
    pub fn infeasible(what: impl std::fmt::Display) -> Failure {
        Failure { code: 3, ..Failure::new(what) }
    }
    /// With what to do about it.
    pub fn help(self, help: impl Into<String>) -> Failure {
        Failure { help: Some(help.into()), ..self }
    }
    /// Prints it, and gives the exit code.
    pub fn report(self) -> ExitCode {
        let code = self.code;
        eprintln!("{:?}", miette::Report::new(self));
        ExitCode::from(code)
    }
}
