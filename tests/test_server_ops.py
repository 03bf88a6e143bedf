"""/metrics, /slots and /plan, over the fake engine: what a client did is what is counted."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from a3b_gguf.llama.buffers import Buffer
from a3b_server.errors import APIError
from a3b_server.generation import Drawn
from a3b_server.messages import Counts, Facts, Finished, SlotView, Snapshot, Submit
from a3b_server.metrics import Metrics
from a3b_server.sampling import Sampling
from chat_server import Running, chat_server


def numbers(text: str) -> dict[str, float]:
    """Every sample as "name{label=value}": number."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels[name] for name in sorted(sample.labels))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def running(tiny_bf16: Path) -> object:
    with chat_server(tiny_bf16) as server:
        yield server


def scrape(running: Running) -> dict[str, float]:
    answer = running.client._client.get(f"{running.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return numbers(answer.text)


def test_what_a_client_did_is_counted(running: Running) -> None:
    before = scrape(running)
    assert before["a3b_engine_up"] == 1
    whole = running.ask("capital")
    "".join(chunk.choices[0].delta.content or "" for chunk in running.ask("say 3", stream=True) if chunk.choices)
    with pytest.raises(openai.BadRequestError):
        running.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]
        )
    with pytest.raises(openai.NotFoundError):
        running.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    after = scrape(running)
    assert after["a3b_requests_total{stop}"] == 2
    assert after["a3b_generated_tokens_total"] > whole.usage.completion_tokens
    assert after["a3b_prompt_tokens_total{read}"] > whole.usage.prompt_tokens
    assert after["a3b_first_token_seconds_count"] == 2
    assert after["a3b_token_gap_seconds_count"] == after["a3b_generated_tokens_total"] - 4  # two firsts, and two ends that are not sent
    assert after["a3b_refusals_total{M031}"] == 1
    assert after["a3b_refusals_total{model_not_found}"] == 1
    assert after["a3b_requests_in_flight"] == 0


def test_slots_tell_lengths_and_no_text(running: Running) -> None:
    running.ask("capital")
    told = running.client._client.get(f"{running.url}/slots").json()
    assert told["n_waiting"] == 0
    assert set(told) == {"slots", "n_waiting", "checkpoints", "counts", "clip"}
    assert "capital" not in str(told)


def test_a_server_without_a_plan_says_so(running: Running) -> None:
    answer = running.client._client.get(f"{running.url}/plan")
    assert answer.status_code == 404
    assert "plan" in answer.json()["error"]["message"]


def test_numbers_of_the_engine_are_shown_as_they_are() -> None:
    metrics = Metrics([("model", "RAM", 100)])
    snapshot = Snapshot(
        (SlotView(0, "writing", 40, "r"), SlotView(1, "idle", 2)), 3, (5, 8), Counts(n_continued=1, n_copied=2, n_restored=4, n_loaded=8)
    )
    facts = Facts(1024, 512, 2, (Buffer("model", "CPU", 60), Buffer("model", "CPU", 50)), rss_bytes=7)
    found = numbers(metrics.text("busy", 7, 9, facts, snapshot).decode())
    assert found["a3b_engine_up"] == 1
    assert (found["a3b_engine_restarts"], found["a3b_requests_in_flight"], found["a3b_requests_waiting"]) == (7, 9, 3)
    assert (found["a3b_slots{writing}"], found["a3b_slots{idle}"], found["a3b_slots{reading}"]) == (1, 1, 0)
    assert (found["a3b_cache_tokens"], found["a3b_cache_tokens_most"]) == (42, 1024)
    assert (found["a3b_checkpoints{held}"], found["a3b_checkpoints{most}"]) == (5, 8)
    assert [found[f"a3b_prompt_starts{{{kind}}}"] for kind in ("continued", "copied", "restored", "loaded")] == [1, 2, 4, 8]
    assert found["a3b_memory_bytes{RAM,model,predicted}"] == 100
    assert found["a3b_memory_bytes{RAM,model,real}"] == 110
    assert found["a3b_memory_bytes{RAM,process,real}"] == 7
    assert numbers(metrics.text("dead", 0, 0, None, None).decode())["a3b_engine_up"] == 0


def test_a_generation_is_counted_once() -> None:
    metrics = Metrics()
    generation = metrics.generation(Submit("r", (1, 2, 3), 9, Sampling()), lambda request: None)
    for item in (Drawn(1), Drawn(2), Drawn(3), Finished("r", "length", 3, 3, n_cached=2, n_drafted=4, n_accepted=1)):
        generation.put(item)
    metrics.generation(Submit("s", (1,), 9, Sampling()), lambda request: None).put(ValueError("x"))
    found = numbers(metrics.text("ready", 0, 0, None, None).decode())
    assert (found["a3b_requests_total{length}"], found["a3b_requests_total{failed}"]) == (1, 1)
    assert (found["a3b_prompt_tokens_total{cached}"], found["a3b_prompt_tokens_total{read}"]) == (2, 1)
    assert (found["a3b_first_token_seconds_count"], found["a3b_token_gap_seconds_count"]) == (1, 2)
    assert (found["a3b_drafted_tokens_total"], found["a3b_accepted_tokens_total"]) == (4, 1)


def test_a_refusal_is_counted_by_its_rules() -> None:
    findings = [{"rule": "M031", "severity": "error"}, {"rule": "M030", "severity": "note"}, {"rule": "M031", "severity": "error"}]
    assert APIError(400, "x", "prompt_refused", more={"findings": findings}).rules == ("M031",)
    assert APIError(404, "x", "not_found").rules == ("not_found",)
