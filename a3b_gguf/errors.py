"""Every error that a3b raises on purpose, and the exit code it ends with.

    A3BError
    ├── AnswerIsNo     1   the work was done and the answer is no: findings, does not fit, mismatch
    ├── UsageError     2   the command line cannot be obeyed
    ├── BadInput       3   a file is not what it must be: which file, tensor or key, found, expected
    ├── MachineLacks   4   this machine lacks something: disk, memory, a port, a library
    └── Interrupted  130   Ctrl-C stopped work that can be continued

The message says what happened and where; `hint` says what to do. Only the command line turns them into text.
"""

from __future__ import annotations


class A3BError(Exception):
    """An expected failure. `hint`: what the user can do, one sentence."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class AnswerIsNo(A3BError):
    """The question was answered, and the answer is no."""

    exit_code = 1


class UsageError(A3BError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class BadInput(A3BError):
    """A file or value that was read is wrong."""

    exit_code = 3


class MachineLacks(A3BError):
    """The machine lacks what the work needs."""

    exit_code = 4


class Interrupted(A3BError):
    """Ctrl-C stopped work that can be continued; the message says how."""

    exit_code = 130
