"""Failures that a user can act on; the command line prints them without a traceback and exits 2."""


class UserError(Exception):
    """Something the user can fix. The message says where, what was found, what was expected and what to do."""


class ConfigError(UserError):
    """A setting, a config file, or a combination of both does not fit."""


class DataError(UserError):
    """Input conversations, a tokenizer or a chat template cannot be used."""


class StoreError(UserError):
    """A store of hidden states is missing, unfinished, damaged, or of another configuration."""


class ResumeError(UserError):
    """A run or an extraction cannot go on from what is on disk."""


class Interrupted(BaseException):
    """A signal stopped a command after everything was left resumable; the exit code is 128 + signum."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
