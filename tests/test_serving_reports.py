"""Bug reports of other servers about serving, each under its address, over HTTP and the embedded model: what must come out here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from a3b_gguf.llama.params import LoadParams
from chat_server import CALL, LONG_TEXT, MODEL, WEATHER, Running, chat_server
from streams import joined
from test_server_ops import numbers

FACTS = "Keep to the facts and answer shortly. " * 40


@pytest.fixture(scope="module")
def one_slot(tiny_bf16: Path) -> Iterator[Running]:
    """As most people run it: one request at a time, checkpoints on."""
    with chat_server(tiny_bf16, params=LoadParams(n_ctx=2048, n_batch=256, n_ubatch=256, checkpoint_bytes=16 << 20)) as running:
        yield running


def cached(answer: Any) -> int:
    found: int = answer.usage.prompt_tokens_details.cached_tokens
    return found


def chat(running: Running, *turns: str, **more: Any) -> Any:
    """A chat with a long system message; turns: user, assistant, user ..."""
    messages: list[Any] = [{"role": "system", "content": FACTS}]
    messages += [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    asked = {"max_tokens": 24, "temperature": 0, "extra_body": {"enable_thinking": False}, **more}
    return running.client.chat.completions.create(model=MODEL, messages=messages, **asked)


def test_the_second_turn_of_a_hybrid_is_not_read_from_the_start(one_slot: Running) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/21831, 20225"""
    said = chat(one_slot, "What is the capital of Chile?").choices[0].message.content
    second = chat(one_slot, "What is the capital of Chile?", said, "And of Japan?")
    new = len(one_slot.service.vocab.tokenize(f"{said}<|im_end|>\n<|im_start|>user\nAnd of Japan?<|im_end|>\n", True))
    assert second.usage.prompt_tokens - cached(second) <= new + 64
    again = chat(one_slot, "What is the capital of Chile?", said, "And of Japan?")
    assert second.choices[0].message.content == again.choices[0].message.content


def test_prompts_with_a_changing_last_line_share_what_is_before(one_slot: Running) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/24714"""
    answers = [chat(one_slot, f"What is the capital of Italy? It is day {day}.") for day in (1, 2, 3)]
    assert all(answer.usage.prompt_tokens - cached(answer) < 100 for answer in answers[1:]), [cached(answer) for answer in answers]


def test_the_same_prompt_twice_gives_the_same_answer(one_slot: Running) -> None:
    """https://github.com/JamePeng/llama-cpp-python/issues/59 (the second was </</</), abetlen/llama-cpp-python/issues/2140 (decode -1)"""
    prompt = "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    said = [one_slot.client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0).choices[0].text for _ in range(3)]
    assert said[0]
    assert len(set(said)) == 1


def test_a_second_stream_waits_and_the_first_is_not_cut(one_slot: Running) -> None:
    """https://github.com/abetlen/llama-cpp-python/issues/897"""
    questions = [f"What is the capital of {country}?" for country in ("Chile", "Japan", "France")]
    alone = [one_slot.ask(question, max_tokens=30, temperature=0).choices[0].message.content for question in questions]
    with ThreadPoolExecutor(3) as pool:
        streams = list(pool.map(lambda q: joined(one_slot.ask(q, max_tokens=30, temperature=0, stream=True))[0], questions))
    assert [(said["content"], said["finish_reason"]) for said in streams] == [(text, "stop") for text in alone]


def test_json_of_a_thinking_model_holds_no_think_tag(one_slot: Running) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/20260: </think> leaked into the content"""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    thinking = {"enable_thinking": True, "thinking_budget": 12}
    said, _ = joined(one_slot.ask("Which city?", response_format=wanted, max_tokens=300, temperature=0, stream=True, extra_body=thinking))
    assert list(json.loads(said["content"])) == ["city"]
    assert "think>" not in said["content"] + said["reasoning_content"]


def test_a_limit_that_falls_into_the_reasoning_leaves_no_content(one_slot: Running) -> None:
    """https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1990, jundot/omlx/issues/3796 (the reasoning went into the content)"""
    hot: dict[str, Any] = {"temperature": 0, "extra_body": {"enable_thinking": True}, "logit_bias": bias(one_slot, "</think>")}
    (choice,) = one_slot.ask("What is 2 plus 3?", max_tokens=6, **hot).choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content
    hot["extra_body"] = {"enable_thinking": True, "thinking_budget": 6}
    (choice,) = one_slot.ask("What is the capital of Chile?", max_tokens=60, **hot).choices
    assert choice.message.content, "with a budget there is room for an answer"


def bias(running: Running, text: str) -> dict[str, int]:
    return {str(running.service.vocab.tokenize(text, True)[0]): -100}


def test_a_result_of_a_tool_without_a_users_turn_is_answered(one_slot: Running) -> None:
    """https://github.com/ollama/ollama/issues/17778: "No user query found in messages\""""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "You help."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with pytest.raises(openai.BadRequestError, match="M040: messages: there is no user message; add what the user asks"):
        one_slot.client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)  # type: ignore[list-item]
    messages.insert(1, {"role": "user", "content": "What is the weather in Paris?"})
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):  # https://github.com/NotPunchnox/rkllama/pull/168: text was no mapping
        call["function"]["arguments"] = arguments  # type: ignore[index]
        answer = one_slot.client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)  # type: ignore[list-item]
        assert answer.usage is not None
        assert answer.usage.completion_tokens


@pytest.mark.parametrize(
    "off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, {"reasoning_effort": "none"}]
)
def test_thinking_is_off_in_a_stream_when_the_request_says_so(one_slot: Running, off: dict[str, Any]) -> None:
    """https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1573, ggml-org/llama.cpp/issues/13160"""
    messages: list[Any] = [{"role": "user", "content": "What is the capital of Chile?"}]
    stream = one_slot.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}, extra_body=off
    )
    said, _ = joined(stream)
    assert (said["content"], said["reasoning_content"]) == ("The capital of Chile is Santiago.", "")
    assert said["usage"].completion_tokens_details.reasoning_tokens == 0


def test_a_body_without_messages_is_told_which_field_is_missing(one_slot: Running) -> None:
    """https://github.com/fishjar/kiss-translator/issues/527"""
    answer = one_slot.client._client.post(f"{one_slot.url}/v1/chat/completions", json={"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_many_tools_with_names_of_mcp_servers(one_slot: Running, choice: Any) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/20260, 24658: the grammar of so many names was not read"""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": ["integer", "null"]}}, "required": ["path"]}
    names = [f"mcp__server-{i}__read_file" for i in range(25)]
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
    answer = one_slot.ask("Read it.", tools=tools, tool_choice=choice, max_tokens=100, temperature=0, extra_body={"enable_thinking": False})
    assert "warnings" not in getattr(answer, "x_a3b", {})
    if choice == "required" and answer.choices[0].finish_reason != "length":
        assert {call.function.name for call in answer.choices[0].message.tool_calls} <= set(names)


def test_a_long_argument_comes_in_many_pieces(tiny_bf16: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/27005, vllm-project/vllm/issues/30439, noonghunna/club-3090/issues/145"""
    with chat_server(tiny_bf16) as fake:
        said, chunks = joined(fake.ask("long call", tools=[WEATHER], stream=True))
    pieces = [call.function.arguments for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert (json.loads("".join(pieces)), said["finish_reason"]) == ({"city": LONG_TEXT}, "tool_calls")
    assert len(pieces) > 50
    assert max(map(len, pieces)) < 40


def test_arguments_of_a_streamed_call_are_pieces_of_valid_json(one_slot: Running) -> None:
    """https://github.com/sgl-project/sglang/issues/27005, vllm-project/vllm/issues/30439, noonghunna/club-3090/issues/145"""
    said, chunks = joined(
        one_slot.ask("What is the weather in Paris?", tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0, stream=True)
    )
    assert json.loads(said["tool_calls"][0][3])["city"]
    assert said["finish_reason"] == "tool_calls"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    assert CALL not in said["content"]


def test_limits_ids_and_errors_are_what_they_should_be(one_slot: Running) -> None:
    """https://github.com/LostRuins/koboldcpp/issues/2481: a prompt that is cut without a word, ids that are all the same, errors as 200"""
    with pytest.raises(openai.BadRequestError, match="a request may have 2,048 tokens") as refused:
        one_slot.ask("What is the capital of Chile?", max_tokens=2040)
    assert refused.value.code == "context_length_exceeded"
    answers = [one_slot.ask("What is the capital of Chile?", max_tokens=20, temperature=0, stop="of") for _ in range(3)]
    assert len({answer.id for answer in answers}) == 3
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}
    chunks = list(one_slot.ask("What is the capital of Chile?", max_tokens=20, temperature=0, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1


def test_four_long_requests_that_exceed_the_context_together_are_all_answered(tiny_bf16: Path) -> None:
    """A public report of another server: all of them were aborted."""
    params = LoadParams(n_ctx=2048, n_seq_max=4, n_outputs_max=4, n_batch=256, n_ubatch=256)
    with chat_server(tiny_bf16, params=params) as slots, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda n: slots.ask(f"Say {n}. " * 80, max_tokens=400, extra_body=LONG), range(4)))
    assert {answer.choices[0].finish_reason for answer in together} == {"length"}
    assert {answer.usage.completion_tokens for answer in together} == {400}
    assert sum(answer.usage.prompt_tokens + 400 for answer in together) > 2048


LONG = {"enable_thinking": False, "ignore_eos": True}


def test_a_request_ends_at_its_time(one_slot: Running) -> None:
    answer = one_slot.ask("Count.", max_tokens=1900, extra_body={"ignore_eos": True, "time_limit_s": 0.05})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 1900


def test_a_request_is_cancelled_by_its_id(one_slot: Running) -> None:
    post = one_slot.client._client.post
    stream = iter(one_slot.ask("Count.", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}))
    answer_id = next(stream).id
    assert answer_id in [slot["request"] for slot in one_slot.client._client.get(f"{one_slot.url}/slots").json()["slots"]]
    assert post(f"{one_slot.url}/cancel", json={"id": answer_id}).json() == {"id": answer_id, "cancelled": 1}
    with pytest.raises(openai.APIError, match="was cancelled"):
        list(stream)
    gone = post(f"{one_slot.url}/cancel", json={"id": answer_id})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "id")
    found = numbers(one_slot.client._client.get(f"{one_slot.url}/metrics").text)
    assert found["a3b_requests_total{cancelled}"] >= 1
    assert found["a3b_memory_bytes{RAM,process,real}"] > 1 << 20


def test_whoever_waits_for_a_whole_answer_learns_that_it_was_cancelled(one_slot: Running) -> None:
    def ask() -> Any:
        with pytest.raises(openai.APIStatusError) as ended:
            one_slot.ask("Count.", max_tokens=900, n=2, extra_body={"ignore_eos": True})
        return ended.value

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        named = None
        while named is None:
            slots = one_slot.client._client.get(f"{one_slot.url}/slots").json()["slots"]
            named = next((slot["request"] for slot in slots if slot["request"]), None)
        whole_id = named.removesuffix("-0").removesuffix("-1")
        assert one_slot.client._client.post(f"{one_slot.url}/cancel", json={"id": whole_id}).json()["cancelled"] in (1, 2)
        error = asking.result()
    assert (error.status_code, error.code) == (409, "request_cancelled")
