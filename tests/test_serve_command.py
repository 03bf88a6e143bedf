"""`a3b serve` from the outside: what it prints, how it ends, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from a3b_gguf.cli import main
from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.flows.serve import address, sampling_of
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.metadata import Metadata, f32, i32, string
from a3b_server.access import api_key, origin
from a3b_server.sampling import Sampling
from a3b_server.serve import listen
from serving import HANGS_SECONDS, serving

PLAN = ("--ctx", "2048", "--parallel", "2")
HERE = (*PLAN, "--ram", "8GiB")  # a machine that is described need not be measured, which saves a process


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `a3b serve` in this process, for ways that end by themselves. The machine is described, which saves a process."""

    def once(*args: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["a3b", "serve", *map(str, args), "--ram", "8GiB"])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(code if isinstance(code, int) else 0, out, err)

    return once


@contextmanager
def inheriting(sort: signal.Handlers, which: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Children that are started meanwhile treat `which` so."""
    former = signal.signal(which, sort)
    try:
        yield
    finally:
        signal.signal(which, former)


def assert_all_gone(family: list[psutil.Process]) -> None:
    """Whoever takes in orphans may take a second to bury them: a zombie has ended too."""

    def lives(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    alive = family
    for _ in range(20 * HANGS_SECONDS):
        alive = [process for process in family if lives(process)]
        if not alive:
            break
        psutil.wait_procs(alive, timeout=0.05)
    assert not alive
    assert len(family) > 0


def test_it_plans_loads_serves_and_ends_on_sigterm(tiny_bf16: Path) -> None:
    with serving(tiny_bf16, *PLAN, "--thinking", "off", "--api-key", "secret") as served:
        said = "".join(served.lines)
        assert "Choices" in said
        assert "2 at a time, 2,048 tokens" in said
        compared = {words[0]: words[1:] for line in served.lines if len(words := line.split()) == 5}
        assert "dry run: llama.cpp's allocator agrees" in said
        assert "the engine's process holds" in said
        for kind in ("model", "context", "output"):
            device, predicted, real, _ = compared[kind]
            assert device == "RAM"
            assert float(predicted) == pytest.approx(float(real), abs=0.11)
        with openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=tiny_bf16.stem, messages=[{"role": "user", "content": "What is the capital of Chile?"}], max_tokens=30
            )
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.choices[0].message.content
        family = served.family
        assert served.end(signal.SIGTERM) == 0
        assert_all_gone(family)


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])
def test_it_ends_on_ctrl_c_in_the_middle_of_an_answer(tiny_bf16: Path, inherited: signal.Handlers) -> None:
    """Also as a job that a shell started in the background, which ignores SIGINT until someone handles it."""
    with (
        inheriting(inherited),
        serving(tiny_bf16, *HERE) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        family = served.family
        stream = client.chat.completions.create(
            model=tiny_bf16.stem, messages=[{"role": "user", "content": "Count."}], stream=True, max_tokens=1500
        )
        next(iter(stream))
        os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does: the engine gets it too
        next(iter(stream))  # and goes on
        stream.close()
        assert served.process.wait(HANGS_SECONDS) == 130
        assert_all_gone(family)


def test_a_second_ctrl_c_ends_answers_at_once_and_without_a_traceback(tiny_bf16: Path, tmp_path: Path) -> None:
    here = ("--ctx", "60000", "--ram", "8GiB")
    with (
        (tmp_path / "errors").open("wb") as errors,
        serving(tiny_bf16, *here, errors=errors) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        family = served.family
        asked = {"extra_body": {"ignore_eos": True}, "max_tokens": 50_000}
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model=tiny_bf16.stem, messages=[{"role": "user", "content": "Count."}], stream=True, **asked
        )
        next(iter(stream))
        served.process.send_signal(signal.SIGINT)
        with suppress(ConnectionError):
            while True:  # until the first signal has arrived: it listens no more
                socket.create_connection(("127.0.0.1", int(served.url.split(":")[2].split("/")[0]))).close()
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert served.process.wait(HANGS_SECONDS) == 130
        assert_all_gone(family)
    assert (tmp_path / "errors").read_text() == ""


def test_it_ends_when_its_terminal_goes_away(tiny_bf16: Path) -> None:
    with inheriting(signal.SIG_DFL, signal.SIGHUP), serving(tiny_bf16, *HERE) as served:  # also when the suite itself runs under nohup
        family = served.family
        assert served.end(signal.SIGHUP) == 0
        assert_all_gone(family)


def test_nothing_survives_a_killed_server(tiny_bf16: Path) -> None:
    with serving(tiny_bf16, *HERE) as served:
        family = served.family
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
        assert_all_gone(family)


def test_a_dry_run_prints_the_plan_and_stops(tiny_bf16: Path, run: Callable[..., Done]) -> None:
    done = run(tiny_bf16, *PLAN, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Choices" in done.stdout
    assert str(tiny_bf16) not in done.stdout
    planned = json.loads(run(tiny_bf16, *PLAN, "--dry-run", "--json").stdout)
    assert (planned["load"]["n_ctx"], planned["load"]["n_seq_max"]) == (2048, 2)


def test_a_plan_for_gpus_that_are_not_here_is_shown_and_not_served(tiny_bf16: Path, run: Callable[..., Done]) -> None:
    shown = run(tiny_bf16, *PLAN, "--vram", "8GiB", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    refused = run(tiny_bf16, *PLAN, "--vram", "8GiB", "--port", "0")
    assert refused.returncode == 4
    assert "the plan uses 1 GPU, llama.cpp finds none on this machine" in refused.stderr
    assert "--vram 0" in refused.stderr


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(tiny_bf16: Path, run: Callable[..., Done]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tiny_bf16, *PLAN, "--port", str(port))
    assert done.returncode == 4
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
    assert "choose another with --port" in done.stderr
    assert done.stdout == ""  # not even a plan was made


def test_an_address_of_another_machine() -> None:
    with pytest.raises(MachineLacks, match="cannot listen on 203.0.113.9") as caught:  # RFC 5737: nobody has it
        listen("203.0.113.9", 0)
    assert "--host" in caught.value.hint


def test_what_the_planner_accepts_and_llama_cpp_does_not(tiny_bf16: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_bf16.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.1.attn_narm.weight"))
    done = run(broken, *PLAN, "--port", "0")
    assert done.returncode == 3, done.stderr
    assert "tensor 'blk.1.attn_norm.weight' not found" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--host", "no such host"), 2, "no address"),
        (("--host", "a..b"), 2, "no address"),
        (("--host", ""), 2, "the address is empty"),
        (("--ctx", "1M"), 2, "1,000,000"),
    ],
)
def test_wrong_flags(tiny_bf16: Path, run: Callable[..., Done], args: tuple[str, ...], code: int, words: str) -> None:
    done = run(tiny_bf16, *args, "--port", "0")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--port", "70000"), "'--port'"),
        (("--port", "-1"), "'--port'"),
        (("--json",), "--dry-run"),
        (("--system", "maybe"), "maybe"),
        (("--cors", "*", "--cors", "foo"), "--cors: 'foo' is no origin"),
        (("--api-key", "good", "--api-key", ""), "--api-key: a key is empty"),
    ],
)
def test_flags_that_are_wrong_for_every_model(tmp_path: Path, run: Callable[..., Done], args: tuple[str, ...], words: str) -> None:
    done = run(tmp_path / "none.gguf", *args)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr


def test_nothing_is_made_for_a_model_that_is_not_there(tmp_path: Path, run: Callable[..., Done]) -> None:
    assert run(tmp_path / "none.gguf", "--states", tmp_path / "states").returncode == 3
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    ("given", "sent"),  # what browsers send: RFC 6454, section 6.2, and the examples of the URL standard's serialized hosts
    [
        ("*", "*"),
        ("https://page.example", "https://page.example"),
        ("HTTPS://Page.Example:443", "https://page.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("https://page.example:80", "https://page.example:80"),
        ("http://[0:0:0:0:0:0:0:1]:8080", "http://[::1]:8080"),
        ("chrome-extension://mlbjhfmbfdmaapefnlhbkfknfhpmhmoc", "chrome-extension://mlbjhfmbfdmaapefnlhbkfknfhpmhmoc"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(given: str, sent: str) -> None:
    assert origin(given) == sent


NO_ORIGINS = """
foo  null  page.example  localhost:3000  file:///home  https://  https://page.example/  https://page.example/path  https://me@page.example
https://*.page.example  https://page..example  https://page.example:  https://page.example:0  https://page.example:65536  https://p\u00e4ge.example
http://[::1  http://[1.2.3.4]  http://a,http://b
"""


@pytest.mark.parametrize("given", ["", "https://page.example ", "http://a b", *NO_ORIGINS.split()])
def test_what_is_no_origin(given: str) -> None:
    with pytest.raises(UsageError, match="is no origin of a web page") as caught:
        origin(given)
    assert "https://page.example" in caught.value.hint


def test_keys_that_no_client_could_send() -> None:
    for good in ("secret", "sk-1_2.3~4+5/6==", "two words", "schl\u00fcssel"):
        assert api_key(good) == good
    for bad in (" ", "secret ", "\tsecret", "sec\nret", "sec\x00ret", "\udcff"):
        with pytest.raises(UsageError, match="--api-key") as caught:
            api_key(bad)
        assert "sec" not in caught.value.message


def test_files_that_are_no_model_to_chat_with(tiny_bf16: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    assert run(tmp_path / "none.gguf").returncode == 3
    assert run(tmp_path).returncode == 3
    dumb = tmp_path / "dumb.gguf"
    dumb.write_bytes(tiny_bf16.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_temp1ate"))
    done = run(dumb, *PLAN, "--port", "0")
    assert (done.returncode, "chat_template is missing" in done.stderr) == (3, True), done.stderr


def test_a_model_brings_its_own_sampling() -> None:
    def of(**values: object) -> Sampling:
        metadata: Metadata = {f"general.sampling.{name}": value for name, value in values.items()}  # type: ignore[misc]
        return sampling_of(GGUFFile(Path("x"), 3, metadata, (), 32, 0, 0))

    assert of() == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert of(temp=f32(0.6), top_k=i32(20), top_p=f32(0.95), min_p=f32(0.0)) == Sampling(0.6, 20, 0.95, 0.0)
    assert of(temp=f32(-1), top_k=string("many"), top_p=f32(float("nan"))) == Sampling()


def test_addresses() -> None:
    assert address("127.0.0.1", 8080) == "http://127.0.0.1:8080"
    assert address("::1", 8080) == "http://[::1]:8080"
