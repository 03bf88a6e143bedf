"""The command line: one file a command. Each parses, calls one function and shows its value; heavy imports live inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise

import typer

from a3b_gguf import __version__
from a3b_gguf.cli import calibrate, convert, doctor, inspect, models, plan, quantize, serve, toolbench, verify_prompt
from a3b_gguf.cli import eval as eval_command
from a3b_gguf.errors import A3BError, MachineLacks, UsageError
from a3b_gguf.openmp import spin_defaults

COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert.command,
    "quantize": quantize.command,
    "calibrate": calibrate.command,
    "eval": eval_command.command,
    "inspect": inspect.command,
    "plan": plan.command,
    "serve": serve.command,
    "models": models.command,
    "doctor": doctor.command,
    "toolbench": toolbench.command,
    "verify-prompt": verify_prompt.command,
}

SAY_IT_THEMSELVES = ("--host", "--api-key", "--cors")  # flags that an empty value is said of in better words


def build() -> typer.Typer:
    """The application with every command of COMMANDS."""
    app = typer.Typer(
        name="a3b",
        help="From published safetensors to a quantized, planned and served GGUF, for models with about 3 billion active parameters.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        _version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ) -> None:
        pass

    for name, function in COMMANDS.items():
        app.command(name)(function)
    return app


def check_arguments(arguments: list[str]) -> None:
    """Raises UsageError for an empty one, which would be the current folder where a path is expected."""
    for flag, value in pairwise(["", *arguments]):
        if not value and flag not in SAY_IT_THEMSELVES:
            what = f"{flag}: its value" if flag.startswith("--") else "an argument"
            raise UsageError(f"{what} is empty", "is a variable of the shell not set?")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"a3b {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point. Every expected failure becomes one message and its exit code."""
    from a3b_gguf.report.console import fail, flush, prepare

    os.environ.update(spin_defaults(os.environ))  # for llama.cpp here and in every process that is started from here
    prepare()
    try:
        try:
            check_arguments(sys.argv[1:])
            build()()
        finally:
            flush()
    except A3BError as error:
        fail(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, MemoryError) as error:
        lack = _lack(error)
        fail(lack)
        sys.exit(lack.exit_code)


def _lack(error: OSError | MemoryError) -> MachineLacks:
    """What the system refused and no command foresaw."""
    if isinstance(error, MemoryError):
        return MachineLacks(f"the memory does not suffice: {error}" if str(error) else "the memory does not suffice", "end other programs")
    place = f"{error.filename}: " if error.filename is not None else ""
    return MachineLacks(f"{place}{error.strerror or error}", "look at the file's rights and its disk")
