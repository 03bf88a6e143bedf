"""A real server under clients of every kind: nothing stays behind, and honest ones get what they would have got alone."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from rude_clients import GARBAGE, address_of, garbage, honest, vanishing
from serving import Served, serving
from test_server_ops import numbers

WAVE, MAX_TOKENS = 32, 16
COUNTRIES = ("Chile", "Japan", "France", "Italy", "Spain", "Norway", "Kenya", "Peru")
CLEAR = 0.5  # logits; beside others rows round differently, by less than a tenth of this
PROVE_CLIENTS = int(os.environ.get("A3B_PROVE_CLIENTS", "1000"))


@pytest.fixture(scope="module")
def served(tiny_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (tmp_path_factory.mktemp("load") / "errors").open("w+b") as errors:
        with serving(tiny_bf16, "--ctx", "8192", "--parallel", "4", patience=1800, errors=errors) as found:
            yield found
            found.process.kill()
            assert found.process.stdout is not None
            assert found.process.stdout.read() == "", "no text of a request is printed"
        errors.seek(0)
        assert errors.read().decode() == "", "clients alone are no reason to log anything"


def ask_alone(served: Served, country: str) -> str | None:
    """The greedy answer of a request that runs alone, None where a choice of it was too close to be the same beside others."""
    with openai.OpenAI(base_url=f"{served.url}", api_key="none", max_retries=0, timeout=600) as client:
        answer = client.chat.completions.create(
            model="tiny-bf16", messages=[{"role": "user", "content": f"What is the capital of {country}?"}], max_tokens=MAX_TOKENS,
            temperature=0, logprobs=True, top_logprobs=2, extra_body={"enable_thinking": False},
        )  # fmt: skip
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tops = [entry.top_logprobs for entry in choice.logprobs.content or ()]
    return choice.message.content if all(first.logprob - second.logprob > CLEAR for first, second in tops) else None


def get(served: Served, path: str) -> str:
    with urllib.request.urlopen(served.url.removesuffix("/v1") + path, timeout=600) as answer:
        found: str = answer.read().decode()
        return found


def roles(count: int, chance: random.Random) -> list[str]:
    """A third vanish, a tenth send garbage."""
    found = ["vanish"] * (count // 3) + ["garbage"] * (count // 10)
    found += ["honest"] * (count - len(found))
    chance.shuffle(found)
    return found


class Load:
    """Waves of clients on one server, and what became of them."""

    def __init__(self, served: Served, known: dict[str, str]) -> None:
        self.address, self.known = address_of(served.url), known
        self.chance, self.n = random.Random(7), collections.Counter[str]()
        self.kinds = sorted(GARBAGE)

    async def wave(self, wanted: list[str]) -> None:
        await asyncio.wait_for(asyncio.gather(*(self._one(role) for role in wanted)), 600)

    async def _one(self, role: str) -> None:
        if role == "vanish":
            self.n[await vanishing(self.address, self.chance)] += 1
        elif role == "garbage":
            kind = self.kinds[self.n["garbage"] % len(self.kinds)]
            self.n["garbage"] += 1
            received = await garbage(self.address, GARBAGE[kind])
            assert not received or received.startswith(b"HTTP/1.1 4"), (kind, received[:300])
        else:
            country = self.chance.choice(sorted(self.known))
            said = await honest(self.address, f"What is the capital of {country}?", MAX_TOKENS, self.chance.random() < 0.5)
            assert said == self.known[country]
        self.n[role] += role != "garbage"


def settled(served: Served) -> dict[str, Any]:
    """/slots once the last of those who went away is cancelled; gives up after a number of questions, not of seconds."""
    for _ in range(10_000):
        told: dict[str, Any] = json.loads(get(served, "/slots"))
        if told["n_waiting"] == 0 and all(slot["state"] == "idle" for slot in told["slots"]):
            return told
    raise AssertionError(told)


def fill_cache(served: Served) -> None:
    """Uses every part of the cache once: its pages exist only from then on, which is no leak."""
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=600) as client:
        for i in range(4):
            prompt = [(7 * j + 1000 * i) % 4000 for j in range(2000)]
            client.completions.create(model="tiny-bf16", prompt=prompt, max_tokens=4)


def held(process: psutil.Process) -> tuple[int, int]:
    """Bytes of RAM and open files."""
    return process.memory_info().rss, process.num_fds()


def under_load(served: Served, count: int, warm: int) -> tuple[Load, list[tuple[int, int]], list[tuple[int, int]]]:
    """Runs `count` clients; what each process held after the first `warm`, and at the end."""
    known = {country: said for country in COUNTRIES if (said := ask_alone(served, country)) is not None}
    assert len(known) >= 4, "too few answers are clear enough to be compared"
    load, wanted = Load(served, known), roles(count, random.Random(3))
    processes = [psutil.Process(served.process.pid), *served.family]
    before: list[tuple[int, int]] = []
    for start in range(0, count, WAVE):
        asyncio.run(load.wave(wanted[start : start + WAVE]))
        if not before and start + WAVE >= warm:
            settled(served)
            before = [held(process) for process in processes]
    settled(served)
    after = [held(process) for process in processes]
    counted = numbers(get(served, "/metrics"))
    assert (counted["a3b_requests_in_flight"], counted["a3b_requests_waiting"], counted["a3b_engine_restarts"]) == (0, 0, 0)
    assert counted["a3b_requests_total{cancelled}"] >= 0.9 * load.n["the answer"], "nobody is answered who has gone away"
    assert json.loads(get(served, "/health")) == {"status": "ready"}
    assert {country: ask_alone(served, country) for country in known} == known
    assert served.process.poll() is None
    return load, before, after


def test_a_few_clients_of_every_kind(served: Served) -> None:
    load, _, after = under_load(served, 2 * WAVE, WAVE)
    assert (load.n["vanish"], load.n["garbage"], load.n["honest"]) == (21, 6, 37)
    assert after[0][1] < 60, "connections of those who went away are closed"


def test_garbage_of_every_kind_is_a_4xx_or_closed(served: Served) -> None:
    async def all_of_it() -> dict[str, bytes]:
        received = await asyncio.gather(*(garbage(address_of(served.url), sent) for sent in GARBAGE.values()))
        return dict(zip(GARBAGE, received, strict=True))

    for kind, received in asyncio.run(all_of_it()).items():
        assert not received or received.startswith(b"HTTP/1.1 4"), (kind, received[:300])
    assert json.loads(get(served, "/health")) == {"status": "ready"}


@pytest.mark.prove
def test_a_thousand_clients_leave_nothing_behind(served: Served) -> None:
    """A3B_PROVE_CLIENTS: another number of clients."""
    fill_cache(served)
    load, before, after = under_load(served, PROVE_CLIENTS, min(256, PROVE_CLIENTS // 4))
    assert load.n["vanish"] == PROVE_CLIENTS // 3
    assert load.n["garbage"] == PROVE_CLIENTS // 10
    assert load.n["honest"] == PROVE_CLIENTS - PROVE_CLIENTS // 3 - PROVE_CLIENTS // 10
    for (bytes_before, files_before), (bytes_after, files_after) in zip(before, after, strict=True):
        assert bytes_after < 1.03 * bytes_before, (before, after)
        assert files_after < files_before + 8  # some may be closing just now
