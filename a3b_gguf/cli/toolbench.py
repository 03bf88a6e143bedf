"""`a3b toolbench`: whether tool calls work through an endpoint."""

from __future__ import annotations

import typer


def command(
    url: str | None = typer.Argument(None, help="An OpenAI-compatible endpoint, like http://127.0.0.1:8080/v1."),
    replay: bool = typer.Option(False, "--replay", help="Score stored model outputs instead: needs no model and no server."),
    questions: str = typer.Option("general", "--questions", help="general, tiny-a3b, or a TOML file of questions."),
    model: str = typer.Option("", "--model", help="The model's name there. [default: the first that it lists]"),
    api_key: str = typer.Option("", "--api-key", envvar="OPENAI_API_KEY", help="Sent as the bearer token."),
    trials: int = typer.Option(3, "--trials", min=1, max=1000, help="How often everything is asked; the worst trial counts."),
    thinking: str = typer.Option("auto", "--thinking", help="on, off, or auto: as the server does by itself."),
    max_tokens: int = typer.Option(4096, "--max-tokens", min=1, max=1 << 30, help="Most tokens of one answer, thinking among them."),
    timeout: float = typer.Option(600.0, "--timeout", min=1, max=86_400, help="Seconds to wait for one answer."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Ask an endpoint 24 questions, three points each: the right decision, the right arguments, the protocol kept."""
    from a3b_gguf.errors import AnswerIsNo, UsageError
    from a3b_gguf.flows.toolbench import ask_endpoint, replay_outputs
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.progress import counted
    from a3b_gguf.report.toolbench import show_result
    from a3b_gguf.toolbench.endpoint import Endpoint

    if replay and (questions != "general" or model):
        raise UsageError("--replay scores stored outputs; --questions and --model are for an endpoint", "leave them out")
    if replay:
        result = replay_outputs(url)
    else:
        with counted("toolbench", "questions", quiet=json) as tell:
            result = ask_endpoint(Endpoint(url or "", model, api_key, timeout), questions, trials, thinking, max_tokens, tell)
    if json:
        say_json(result)
    else:
        show_result(result)
    if result.verdict != "passed":
        raise AnswerIsNo(f"toolbench: {result.verdict}, {result.points} of {result.of} points in the worst trial", result.diagnosis)
