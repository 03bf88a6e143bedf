"""The command line: one file a command. Each parses, calls one function and shows its value; heavy imports live inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from a3b_gguf import __version__
from a3b_gguf.cli import calibrate, convert, doctor, inspect, models, plan, quantize, serve, toolbench, verify_prompt
from a3b_gguf.cli import eval as eval_command
from a3b_gguf.errors import A3BError

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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"a3b {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point. Every expected failure becomes one message and its exit code."""
    from a3b_gguf.report.console import fail

    try:
        build()()
    except A3BError as error:
        fail(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
