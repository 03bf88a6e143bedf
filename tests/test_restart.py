"""An engine that dies: everyone learns of it, and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from a3b_gguf.errors import MachineLacks
from a3b_server.messages import EngineConfig, Facts, Finished, Submit
from a3b_server.process import run_engine
from a3b_server.sampling import Sampling
from a3b_server.supervisor import Drawn, EngineUnavailable, QueueFull, Supervisor
from engine_bench import GREEDY, PARAMS
from fake_engine import Ending, FakeConfig, Script, run_deaf, run_fake

TURN, END = (1, 2), 9
FACTS = Facts(n_ctx=4096, n_ctx_seq=1024, n_seq_max=2)
PROMPTS: dict[Ending, tuple[int, ...]] = {"stop": (1, 2, 3, 9), "die": (1, 2, 4, 9), "silent": (1, 2, 5, 9), "endless": (1, 2, 6, 9)}
FAKE = FakeConfig({prompt: Script((7, 8), ending) for ending, prompt in PROMPTS.items()}, TURN, END, FACTS)


def request(name: str, ending: Ending, max_tokens: int = 1 << 30) -> Submit:
    return Submit(name, PROMPTS[ending], max_tokens, GREEDY)


async def collect(supervisor: Supervisor, wanted: Submit) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for item in supervisor.submit(wanted).items():
        if isinstance(item, Finished):
            return tokens, item
        assert isinstance(item, Drawn)
        tokens.append(item.token)
    raise AssertionError("it never finished")


async def until_up(supervisor: Supervisor, restarts: int) -> None:
    """Returns once the engine was restarted so many times and is ready."""
    while supervisor.n_restarts < restarts or supervisor.state != "ready":
        await asyncio.sleep(0.001)


def session(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_after_a_death_everyone_is_told_when_to_come_back_and_can() -> None:
    async def work() -> None:
        supervisor = Supervisor(run_fake, FAKE)
        supervisor.start()
        await supervisor.ready()
        other = asyncio.create_task(collect(supervisor, request("other", "endless")))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="SIGKILL") as died:
            await collect(supervisor, request("a", "die"))
        assert died.value.retry_seconds is not None
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await other
        assert (supervisor.state, supervisor.n_in_flight) == ("starting", 0)
        with pytest.raises(EngineUnavailable, match="is being restarted") as refused:
            supervisor.submit(request("b", "stop"))
        assert refused.value.retry_seconds is not None
        await until_up(supervisor, 1)
        tokens, end = await collect(supervisor, request("c", "stop"))
        assert (tokens, end.reason) == ([7, 8], "stop")
        await supervisor.stop()
        assert supervisor.state == "dead"

    session(work())


def test_one_that_dies_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    async def work() -> None:
        supervisor = Supervisor(run_fake, FAKE, most_deaths=3)
        supervisor.start()
        await supervisor.ready()
        monkeypatch.setattr("a3b_server.supervisor.asyncio.sleep", sleep)
        for deaths in range(4):
            while supervisor.n_restarts < deaths or supervisor.state != "ready":
                await real(0.001)
            with pytest.raises(EngineUnavailable, match="SIGKILL") as died:
                await collect(supervisor, request(str(deaths), "die"))
            assert (died.value.retry_seconds is None) == (deaths == 3)
        assert supervisor.state == "dead"
        assert isinstance(supervisor.death, MachineLacks)
        with pytest.raises(EngineUnavailable, match="the engine is gone: .*SIGKILL") as gone:
            supervisor.submit(request("x", "stop"))
        assert gone.value.retry_seconds is None
        await supervisor.gone()
        await supervisor.stop()

    session(work())
    assert [pause for pause in pauses if pause != 0.001] == [0.0, 1.0, 2.0]


def test_a_full_queue_is_busy_and_says_when_to_come_back() -> None:
    async def work() -> None:
        supervisor = Supervisor(run_fake, FAKE, n_waiting=1)
        supervisor.start()
        await supervisor.ready()
        generations = [supervisor.submit(request(str(i), "silent")) for i in range(3)]
        assert supervisor.state == "busy"
        with pytest.raises(QueueFull, match="3 requests are being served or wait") as full:
            supervisor.submit(request("4", "stop"))
        assert full.value.retry_seconds >= 1
        generations[0].close()
        while supervisor.state == "busy":
            await asyncio.sleep(0.001)
        assert supervisor.state == "ready"
        await supervisor.stop()

    session(work())


def test_stopping_while_it_waits_for_a_restart_ends_it() -> None:
    async def work() -> None:
        supervisor = Supervisor(run_fake, FAKE)
        supervisor.start()
        await supervisor.ready()
        with pytest.raises(EngineUnavailable):
            await collect(supervisor, request("a", "die"))
        await supervisor.stop()
        assert (supervisor.state, supervisor.pid) == ("dead", None)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            supervisor.submit(request("b", "stop"))

    session(work())


def test_who_waits_learns_that_the_server_stops_before_an_engine_that_takes_its_time_has() -> None:
    """Else the web server would lose its patience, and answers would end torn."""

    async def work() -> None:
        supervisor = Supervisor(run_deaf, FAKE, grace=600)
        supervisor.start()
        await supervisor.ready()
        waiting = asyncio.create_task(collect(supervisor, request("a", "stop")))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(supervisor.stop())
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await waiting
        assert supervisor.pid is not None
        assert not stopping.done()
        os.kill(supervisor.pid, signal.SIGKILL)
        await stopping

    session(work())


def test_a_killed_engine_ends_every_request_is_back_and_answers_the_same(tiny_bf16: Path) -> None:
    async def work() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tiny_bf16, PARAMS))
        supervisor.start()
        await supervisor.ready()
        prompt = tuple(range(100, 140))
        before = await collect(supervisor, Submit("before", prompt, 8, GREEDY))
        wild = [Submit(str(i), prompt, 400, Sampling(temperature=2.0, seed=i, ignore_eos=True)) for i in range(6)]
        working = [asyncio.create_task(collect(supervisor, one)) for one in wild]
        await asyncio.sleep(0)
        assert (supervisor.n_in_flight, supervisor.pid is not None) == (6, True)
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        ends = await asyncio.gather(*working, return_exceptions=True)
        assert all(isinstance(end, EngineUnavailable) and "SIGKILL" in str(end) and end.retry_seconds for end in ends)
        await until_up(supervisor, 1)
        tokens, end = await collect(supervisor, Submit("after", prompt, 8, GREEDY))
        assert (tokens, end.reason) == (before[0], before[1].reason)
        seen = await supervisor.look()
        assert (seen.n_waiting, seen.counts.n_requests) == (0, 1)
        assert [slot.state for slot in seen.slots] == ["idle"] * 4
        await supervisor.stop()
        with pytest.raises(EngineUnavailable):
            await supervisor.look()

    session(work())


@pytest.mark.prove
def test_ten_kills_under_load_lose_nobody(tiny_bf16: Path) -> None:
    """Every request ends, and the engine is back within the time to load and two seconds."""

    async def work() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tiny_bf16, PARAMS), n_waiting=64)
        supervisor.start()
        facts = await supervisor.ready()
        loop = asyncio.get_running_loop()
        answered = lost = 0
        for kills in range(1, 11):
            prompts = [tuple(range(100 + i, 160 + i)) for i in range(24)]
            working = [asyncio.create_task(collect(supervisor, Submit(f"{kills}-{i}", p, 60, GREEDY))) for i, p in enumerate(prompts)]
            while (await supervisor.look()).counts.n_requests < 2 * (kills % 4):
                await asyncio.sleep(0.001)
            os.kill(supervisor.pid or 0, signal.SIGKILL)
            ends = await asyncio.gather(*working, return_exceptions=True)
            killed = loop.time()
            assert all(isinstance(end, tuple | EngineUnavailable) for end in ends)
            answered += sum(isinstance(end, tuple) for end in ends)
            lost += sum(isinstance(end, EngineUnavailable) for end in ends)
            await until_up(supervisor, kills)
            assert loop.time() - killed < facts.load_seconds + 2 + 2  # the process itself has to start, too
        assert answered + lost == 240
        await supervisor.stop()

    asyncio.run(asyncio.wait_for(work(), 300))


@pytest.mark.prove
def test_twenty_thousand_short_requests_leave_no_memory_behind(tiny_bf16: Path) -> None:
    async def work() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tiny_bf16, replace(PARAMS, checkpoint_bytes=4 << 20)), n_waiting=64)
        supervisor.start()
        await supervisor.ready()
        process = psutil.Process(supervisor.pid)
        after_warming = 0
        for wave in range(625):
            requests = [Submit(f"{wave}-{i}", tuple((wave * 31 + i * 7 + j) % 4000 for j in range(20 + i)), 2, GREEDY) for i in range(32)]
            await asyncio.gather(*(collect(supervisor, one) for one in requests))
            if wave == 62:
                after_warming = process.memory_info().rss
        assert process.memory_info().rss < 1.02 * after_warming
        seen = await supervisor.look()
        assert seen.counts.n_requests == 20_000
        assert [slot.state for slot in seen.slots] == ["idle"] * 4
        await supervisor.stop()

    asyncio.run(asyncio.wait_for(work(), 1200))
