"""The endpoint as a client of OpenAI's sees it, over an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from a3b_server.messages import Facts
from a3b_server.service import Options
from chat_server import MODEL, SCRIPTS, WEATHER, Running, chat_server
from fake_engine import FAKE_CACHED
from streams import joined


@pytest.fixture(scope="module")
def server(tiny_bf16: Path) -> Iterator[Running]:
    with chat_server(tiny_bf16) as running:
        yield running


def test_a_whole_answer(server: Running) -> None:
    answer = server.ask("capital")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", SCRIPTS["capital"][0], None)
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.id != server.ask("capital").id
    n_prompt = len(server.service.vocab.tokenize(prompt_text("capital"), True))
    n_answer = len(server.service.vocab.tokenize(SCRIPTS["capital"][0], True)) + 1  # the token that ends it is counted
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (n_prompt, n_answer, n_prompt + n_answer)


def prompt_text(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["capital", "think", "call", "two calls", "emoji", "nothing"])
def test_a_stream_says_the_same_as_a_whole_answer(server: Running, name: str) -> None:
    more = {"tools": [WEATHER], "extra_body": {"enable_thinking": name == "think"}}
    answer = server.ask(name, **more)
    said, chunks = joined(server.ask(name, stream=True, stream_options={"include_usage": True}, **more))
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert said["content"] == (choice.message.content or "")
    assert said["reasoning_content"] == (getattr(choice.message, "reasoning_content", None) or "")
    assert [call[2:] for call in said["tool_calls"]] == [[call.function.name, call.function.arguments] for call in calls]
    assert [call[0] for call in said["tool_calls"]] == list(range(len(calls)))
    assert said["finish_reason"] == choice.finish_reason
    assert said["usage"] == answer.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert "\ufffd" not in said["content"]


def test_reasoning_is_apart_from_the_answer(server: Running) -> None:
    message = server.ask("think", extra_body={"enable_thinking": True}).choices[0].message
    assert message.reasoning_content == "It asks for a capital.\nChile's is Santiago."
    assert message.content == "Santiago."


def test_tool_calls(server: Running) -> None:
    (choice,) = server.ask("call", tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "get_weather", {"city": "Paris"})
    assert (choice.message.content.strip(), choice.finish_reason) == ("Let me look.", "tool_calls")
    assert server.ask("two calls", tools=[WEATHER]).choices[0].message.content is None


def test_no_tools_no_calls(server: Running) -> None:
    ways: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}]
    for more in ways:
        (choice,) = server.ask("call", **more).choices
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert choice.message.content == SCRIPTS["call"][0]


def test_a_call_that_is_cut_off_is_no_call(server: Running) -> None:
    answer = server.ask("call", tools=[WEATHER], max_tokens=len(server.service.vocab.tokenize(SCRIPTS["call"][0], True)) - 3)
    (choice,) = answer.choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    assert [found["rule"] for found in answer.x_a3b["diagnostics"]] == ["O003"]


def test_one_call_at_a_time_when_asked(server: Running) -> None:
    answer = server.ask("two calls", tools=[WEATHER], parallel_tool_calls=False)
    (choice,) = answer.choices
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city":"Paris"}']
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens_details.cached_tokens == FAKE_CACHED


def test_a_tools_result_goes_back_to_the_model(server: Running) -> None:
    first = server.ask("call", tools=[WEATHER]).choices[0].message
    history: list[Any] = [
        {"role": "user", "content": "capital"},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{**first.tool_calls[0].model_dump(), "id": "2"}]},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "user", "content": "think"},
    ]
    answer = server.client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "Santiago."


def test_limits(server: Running) -> None:
    for more in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        answer = server.ask("endless", **more)
        assert (answer.choices[0].message.content.strip(), answer.choices[0].finish_reason) == ("never never never", "length")
        assert answer.usage.completion_tokens == 3
    everything = server.ask("endless")  # no limit: what is left of the context
    assert everything.usage.total_tokens == 1024


STOPS = [("Santiago", "The capital of Chile is "), (["xyz", "l of"], "The capita"), ("Chile is S", "The capital of ")]


@pytest.mark.parametrize(("stop", "content"), STOPS)
def test_stop_strings(server: Running, stop: str | list[str], content: str) -> None:
    answer = server.ask("capital", stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (content, "stop")
    said, _ = joined(server.ask("capital", stop=stop, stream=True, stream_options={"include_usage": True}))
    assert (said["content"], said["finish_reason"]) == (content, "stop")
    n_whole = len(server.service.vocab.tokenize(SCRIPTS["capital"][0], True))
    assert said["usage"].completion_tokens == answer.usage.completion_tokens < n_whole
    assert said["usage"].prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens_details.cached_tokens == FAKE_CACHED


def test_a_stop_string_ends_an_endless_answer_and_frees_its_slot(tiny_bf16: Path) -> None:
    with chat_server(tiny_bf16, facts=Facts(4096, 1024, n_seq_max=1)) as one_slot:
        assert one_slot.ask("endless", stop="never never never").choices[0].finish_reason == "stop"
        assert one_slot.ask("capital").choices[0].message.content == SCRIPTS["capital"][0]


def rendered(server: Running, **more: Any) -> bool:
    """Whether the prompt of such a request left the think block open: the fake's answer is then reasoning."""
    message = server.ask("capital", **more).choices[0].message
    return bool(getattr(message, "reasoning_content", None))


def test_thinking_by_request(server: Running) -> None:
    assert rendered(server, extra_body={"enable_thinking": True})
    assert not rendered(server, extra_body={"enable_thinking": False})
    both = {"enable_thinking": None, "chat_template_kwargs": {"enable_thinking": False}}
    assert not rendered(server, extra_body=both)
    assert rendered(server, extra_body={"enable_thinking": None})  # the template's own way
    assert not rendered(server, extra_body={"enable_thinking": None}, reasoning_effort="none")


@pytest.mark.parametrize(("thinking", "expected"), [("on", True), ("off", False)])
def test_thinking_by_server_and_a_request_stands_above_it(tiny_bf16: Path, thinking: Any, expected: bool) -> None:
    with chat_server(tiny_bf16, Options(thinking=thinking)) as server:
        assert rendered(server, extra_body={"enable_thinking": None}) is expected
        assert rendered(server, extra_body={"enable_thinking": not expected}) is not expected


def test_many_at_once_each_get_their_own(server: Running) -> None:
    def one(i: int) -> tuple[str, str]:
        name = f"say {i % 8}"
        if i % 2:
            return name, joined(server.ask(name, stream=True))[0]["content"]
        return name, server.ask(name).choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        for name, content in pool.map(one, range(48)):
            assert content == SCRIPTS[name][0]
    assert server.supervisor.n_in_flight == 0


def test_models(server: Running) -> None:
    (listed,) = server.client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "a3b")
    assert listed.context_length == 1024  # type: ignore[attr-defined]
    assert server.client.models.retrieve(MODEL) == listed
    assert server.client._client.get(f"{server.url}/health").json() == {"status": "ready"}
