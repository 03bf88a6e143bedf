"""The endpoints over the embedded model itself, as a client of OpenAI's sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from a3b_gguf.llama.params import LoadParams
from a3b_gguf.schema_check import SchemaCheck
from chat_server import CALL, MODEL, WEATHER, Running, chat_server
from outputs import tool
from streams import joined

CAPITAL, WEATHER_IN = "What is the capital of Chile?", "What is the weather in Paris?"


@pytest.fixture(scope="module")
def real(tiny_bf16: Path) -> Iterator[Running]:
    """Eight slots."""
    params = LoadParams(n_ctx=8192, n_seq_max=8, n_outputs_max=8, n_batch=256, n_ubatch=256)
    with chat_server(tiny_bf16, params=params) as running:
        yield running


@pytest.fixture(scope="module")
def split(tiny_bf16: Path) -> Iterator[Running]:
    """Two slots, each with a cache of its own and computed alone, as with --kv-split."""
    params = LoadParams(2048, n_seq_max=2, n_outputs_max=2, n_batch=256, n_ubatch=256, kv_unified=False, reproducible=True)
    with chat_server(tiny_bf16, params=params) as running:
        yield running


def test_the_real_model_streams_what_it_answers(real: Running) -> None:
    for name, more in (("What is the capital of Chile?", {}), ("What is the weather in Paris?", {"tools": [WEATHER]})):
        answer = real.ask(name, max_tokens=60, temperature=0, **more)
        said, _ = joined(real.ask(name, max_tokens=60, temperature=0, stream=True, stream_options={"include_usage": True}, **more))
        (choice,) = answer.choices
        assert said["content"] == (choice.message.content or "")
        assert [call[3] for call in said["tool_calls"]] == [call.function.arguments for call in choice.message.tool_calls or ()]
        assert (said["finish_reason"], said["usage"]) == (choice.finish_reason, answer.usage)


def test_the_real_model_answers_eight_at_once_as_one_by_one(real: Running) -> None:
    countries = ("Chile", "Japan", "France", "Italy", "Spain", "Norway", "Kenya", "Peru")

    def ask(country: str) -> Any:
        return real.ask(f"What is the capital of {country}?", max_tokens=40, temperature=0)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, countries))
    for country, answer in zip(countries, together, strict=True):
        alone = ask(country)
        assert answer.choices[0].message == alone.choices[0].message
        assert (answer.choices[0].finish_reason, answer.usage) == (alone.choices[0].finish_reason, alone.usage)
    assert real.supervisor.n_in_flight == 0


def test_sampling_reaches_the_real_model(split: Running) -> None:
    def ask(**more: Any) -> str:
        content = split.ask("What is the capital of Chile?", max_tokens=16, **more).choices[0].message.content
        assert isinstance(content, str)
        return content

    wild = {"temperature": 2.0, "top_p": 1.0, "seed": 5}
    assert ask(**wild) == ask(**wild)
    assert len({ask(temperature=2.0, seed=seed) for seed in range(6)}) > 1
    assert ask(temperature=2.0, extra_body={"top_k": 1}) == ask(temperature=0)
    for least in ({"temperature": 1e-45}, {"temperature": 1e-30}, {"temperature": 2.0, "top_p": 0}):
        assert ask(**least) == ask(temperature=0)
    assert CALL not in ask(temperature=0)


def test_two_choices_have_seeds_of_their_own(split: Running) -> None:
    """With --kv-split: else the same seed may meet other rounding beside other work, and draw another token."""
    real = split
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 2.0, "seed": 7}
    answer = real.ask(CAPITAL, n=2, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    alone = [real.ask(CAPITAL, **{**asked, "seed": seed}) for seed in (7, 8)]
    assert [choice.message.content for choice in answer.choices] == [one.choices[0].message.content for one in alone]
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    chunks = list(real.ask(CAPITAL, n=2, stream=True, stream_options={"include_usage": True}, **asked))
    said = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert list(said.values()) == [choice.message.content for choice in answer.choices]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [answer.usage.completion_tokens]


def test_log_probabilities_of_every_token(real: Running) -> None:
    answer = real.ask(CAPITAL, logprobs=True, top_logprobs=3, temperature=0, max_tokens=40)
    (choice,) = answer.choices
    listed = choice.logprobs.content
    assert "".join(entry.token for entry in listed) == choice.message.content
    assert b"".join(bytes(entry.bytes) for entry in listed).decode() == choice.message.content
    assert len(listed) == answer.usage.completion_tokens - 1, "the token that ends the answer has no text"
    for entry in listed:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy: the likeliest one"
        assert [top.logprob for top in entry.top_logprobs] == sorted((top.logprob for top in entry.top_logprobs), reverse=True)
    streamed = list(real.ask(CAPITAL, logprobs=True, top_logprobs=3, temperature=0, max_tokens=40, stream=True))
    found = [entry for chunk in streamed for one in chunk.choices if one.logprobs for entry in one.logprobs.content]
    assert [(entry.token, round(entry.logprob, 3)) for entry in found] == [(entry.token, round(entry.logprob, 3)) for entry in listed]
    assert real.ask(CAPITAL, max_tokens=4).choices[0].logprobs is None
    assert real.ask(CAPITAL, max_tokens=4, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_prompt_that_was_read_before_is_told(real: Running) -> None:
    question = "Please spell the word banana for me, and then tell me the capital of Norway."
    real.ask(question, max_tokens=4)
    usage = real.ask(question, max_tokens=4).usage
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_a_text_that_a_stop_string_ends_tells_too_what_was_read_before(real: Running) -> None:
    """A text that goes on from where the one before it ended: a hybrid needs no checkpoint for that."""
    prompt = real.service.vocab.tokenize("Please spell the word cherry for me, and then tell me the capital of Norway.", True)

    def go_on(tokens: list[int], **more: Any) -> Any:
        return real.client.completions.create(model=MODEL, prompt=tokens, temperature=0, **more)

    first = go_on(prompt, max_tokens=8, logprobs=0, extra_body={"ignore_eos": True})
    longer = [*prompt, *real.service.vocab.tokenize(first.choices[0].text, True), *prompt[:4]]
    whole = go_on(longer, max_tokens=8, extra_body={"ignore_eos": True})
    assert whole.usage.prompt_tokens_details.cached_tokens >= len(prompt)
    again = [*longer, *real.service.vocab.tokenize(whole.choices[0].text, True), *prompt[:4]]
    text = go_on(again, max_tokens=8, extra_body={"ignore_eos": True}).choices[0].text
    further = [*again, *real.service.vocab.tokenize(text, True), *prompt[:4]]
    expected = go_on(further, max_tokens=8, extra_body={"ignore_eos": True}).choices[0].text
    stopped = go_on([*further, *real.service.vocab.tokenize(expected, True)], max_tokens=60, stop=[" ", "e", "a", "o", "i", ".", "\n"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 60
    assert stopped.usage.prompt_tokens_details.cached_tokens >= len(prompt)


def test_bias_penalties_and_ignored_ends_reach_the_model(real: Running) -> None:
    free = real.ask(CAPITAL, max_tokens=20, temperature=0)
    (first, *_) = real.service.vocab.tokenize(free.choices[0].message.content, False)
    other = real.ask(CAPITAL, max_tokens=20, temperature=0, logit_bias={str(first): -100})
    assert other.choices[0].message.content != free.choices[0].message.content
    endless = real.ask(CAPITAL, max_tokens=60, temperature=0, extra_body={"ignore_eos": True})
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 60)
    assert real.ask(CAPITAL, max_tokens=20, temperature=0, frequency_penalty=2).choices


def test_reasoning_ends_at_its_budget(real: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "temperature": 1.5, "seed": 3}
    extra = {"enable_thinking": True, "thinking_budget": 5, "logit_bias": {str(real.service.vocab.tokenize("</think>", True)[0]): -100}}
    answer = real.ask(CAPITAL, extra_body=extra, **asked)
    message = answer.choices[0].message
    assert message.content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < 16
    assert len(real.service.vocab.tokenize(message.reasoning_content, False)) <= 8


def test_a_chosen_tool_is_called(real: Running) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = real.ask("Hello!", tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=200)
        (said, _) = joined(real.ask("Hello!", tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=200, stream=True))
        calls = answer.choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {"get_weather"}
        assert isinstance(json.loads(calls[0].function.arguments)["city"], str)
        assert [call[3] for call in said["tool_calls"]] == [call.function.arguments for call in calls]
        assert (answer.choices[0].finish_reason, said["finish_reason"]) == ("tool_calls", "tool_calls")


def test_an_answer_of_a_schema_or_a_call(real: Running) -> None:
    """With both, the model chooses; either way what comes is valid."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    called = real.ask(WEATHER_IN, tools=[WEATHER], response_format=wanted, temperature=0, max_tokens=200).choices[0]
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    hot = real.ask("Hello!", tools=[WEATHER], response_format=wanted, temperature=2.0, n=8, seed=1, max_tokens=400)
    for choice in hot.choices:
        assert bool(choice.message.content) is not bool(choice.message.tool_calls) or choice.finish_reason == "length"
        if choice.message.content and choice.finish_reason == "stop":
            assert SchemaCheck(schema).problem(json.loads(choice.message.content)) is None


def test_an_answer_by_a_grammar_of_the_clients_own(real: Running) -> None:
    grammar = 'root ::= ("yes" | "no") "!"'
    assert real.ask(CAPITAL, extra_body={"grammar": grammar}, temperature=1.5).choices[0].message.content in ("yes!", "no!")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 4},
        "home": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    },
    "required": ["name", "age", "mail", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}}, "required": ["lat"]}},
}


def valid_answers(real: Running, count: int, thinking: bool) -> None:
    """With response_format, hot, every answer is valid."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    check = SchemaCheck(PERSON)
    for seed in range(0, count, 8):
        answer = real.ask(
            "Give me a person as JSON.", response_format=wanted, temperature=1.5, n=8, seed=seed, max_tokens=700,
            extra_body={"enable_thinking": thinking, "thinking_budget": 20}, timeout=600,
        )  # fmt: skip
        assert not hasattr(answer, "x_a3b"), answer.x_a3b
        for choice in answer.choices:
            assert check.problem(json.loads(choice.message.content)) is None
            assert choice.finish_reason == "stop"


def valid_calls(real: Running, count: int, thinking: bool, question: str, tools: list[Any], most_cut: int = 0) -> None:
    """With tool_choice required, hot, every answer is calls, and every call is valid. At most `most_cut` answers write on in a text
    without a bound until their tokens are over; such a call is dropped and said to be cut off.
    """
    checks = {tool["function"]["name"]: SchemaCheck(tool["function"]["parameters"]) for tool in tools}
    n_cut = 0
    for seed in range(0, count, 8):
        answer = real.ask(
            question, tools=tools, tool_choice="required", temperature=1.5, n=8, seed=seed, max_tokens=700,
            parallel_tool_calls=False, extra_body={"enable_thinking": thinking, "thinking_budget": 20}, timeout=600,
        )  # fmt: skip
        cut = [choice for choice in answer.choices if choice.finish_reason == "length"]
        assert [found["rule"] for found in getattr(answer, "x_a3b", {}).get("diagnostics", ())] == ["O003"] * len(cut), answer.x_a3b
        assert answer.usage.completion_tokens >= 700 * len(cut)
        n_cut += len(cut)
        for choice in answer.choices:
            assert not choice.message.content
            if choice in cut:
                assert not choice.message.tool_calls
                continue
            assert choice.finish_reason == "tool_calls", choice
            for call in choice.message.tool_calls:
                assert checks[call.function.name].problem(json.loads(call.function.arguments)) is None
    assert n_cut <= most_cut


# Tools that the model does not know, every text with a bound, so that no answer writes on in one up to its limit.
STRANGE: list[Any] = [
    tool("ping"),
    {"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
    tool("look", ["at"], at={"type": "string", "maxLength": 30}),
]


@pytest.mark.parametrize("thinking", [False, True])
def test_answers_of_a_schema_are_valid(real: Running, thinking: bool) -> None:
    valid_answers(real, 8, thinking)


@pytest.mark.parametrize("thinking", [False, True])
def test_required_calls_are_valid(real: Running, thinking: bool) -> None:
    valid_calls(real, 8, thinking, WEATHER_IN, [WEATHER])
    valid_calls(real, 8, thinking, "Please do something.", STRANGE)


@pytest.mark.prove
@pytest.mark.parametrize("thinking", [False, True])
def test_two_hundred_answers_and_calls(real: Running, thinking: bool) -> None:
    valid_answers(real, 200, thinking)
    valid_calls(real, 200, thinking, WEATHER_IN, [WEATHER], most_cut=4)
    valid_calls(real, 200, thinking, "Please do something.", STRANGE)


def test_a_schema_without_a_grammar_is_checked_afterwards(real: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "far", "schema": {"$ref": "https://example.org/x.json"}}}
    answer = real.ask(CAPITAL, response_format=wanted, temperature=0, max_tokens=30)
    assert "no grammar can say this" in answer.x_a3b["warnings"][0]
    assert [found["rule"] for found in answer.x_a3b["diagnostics"]] == ["O022"]
    loose = {"type": "json_schema", "json_schema": {"name": "five", "schema": {"type": "integer", "multipleOf": 5, "maximum": 9}}}
    answer = real.ask(CAPITAL, response_format=loose, temperature=0, max_tokens=30)
    assert "answer: multipleOf" in answer.x_a3b["warnings"][0]
    is_fine = json.loads(answer.choices[0].message.content) % 5 == 0
    assert ("diagnostics" in answer.x_a3b) is not is_fine


def test_texts_go_on(real: Running) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of Chile?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    chat = real.ask(CAPITAL, temperature=0, max_tokens=30).choices[0].message.content
    tokens = real.service.vocab.tokenize(prompt, True)
    for form in (prompt, tokens):
        answer = real.client.completions.create(model=MODEL, prompt=form, temperature=0, max_tokens=30)
        assert (answer.choices[0].text, answer.object) == (chat, "text_completion")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens)
        stream = real.client.completions.create(
            model=MODEL, prompt=form, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == chat
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens  # type: ignore[union-attr]
    both = real.client.completions.create(model=MODEL, prompt=[prompt, "One, two, three"], n=2, echo=True, temperature=0, max_tokens=6)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[1].text.startswith(prompt)
    assert both.choices[3].text.startswith("One, two, three")
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(tokens) + len(real.service.vocab.tokenize("One, two, three", True))
    probable = real.client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=5, logprobs=2)
    found = probable.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or ()) == probable.choices[0].text
    assert [len(top) for top in found.top_logprobs or ()] == [2] * 5
    assert found.text_offset == [len("".join((found.tokens or [])[:i])) for i in range(5)]
    stopped = real.client.completions.create(model=MODEL, prompt=prompt, temperature=0, stop=chat[3:5])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (chat[: chat.index(chat[3:5])], "stop")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "expected text, token ids"),
        ({"prompt": ""}, "nothing to go on from"),
        ({"prompt": []}, "expected text"),
        ({"prompt": [1, "a"]}, "expected text"),
        ({"prompt": [1, 99999]}, "99999 is no token"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "not served"),
        ({"prompt": "a", "messages": []}, "unknown field messages"),
        ({"prompt": "a " * 9000}, "a request may have"),
    ],
)
def test_texts_that_cannot_go_on(real: Running, body: dict[str, Any], words: str) -> None:
    answer = real.client._client.post(f"{real.url}/v1/completions", json=body)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_raw_chat_that_breaks_a_rule_is_told(real: Running) -> None:
    answer = real.client._client.post(f"{real.url}/v1/completions", json={"prompt": "<|im_start|>user\nhi", "max_tokens": 2})
    assert answer.status_code == 200
    assert {finding["rule"][0] for finding in answer.json()["x_a3b"]["findings"]} == {"R"}


def test_tokens_and_templates(real: Running) -> None:
    def post(path: str, body: Any) -> Any:
        return real.client._client.post(f"{real.url}{path}", json=body).json()

    text = "Santé <|im_end|> 🙂"
    tokens = post("/tokenize", {"content": text})["tokens"]
    assert tokens == real.service.vocab.tokenize(text, True)
    assert post("/tokenize", {"prompt": text, "parse_special": False})["count"] > len(tokens)
    assert post("/detokenize", {"tokens": tokens})["content"] == text
    pieces = post("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces).decode() == text
    assert post("/detokenize", {"tokens": [1 << 20]})["error"]["param"] == "tokens"
    assert post("/tokenize", {})["error"]["param"] == "content"
    shown = post("/apply-template", {"messages": [{"role": "user", "content": "hi"}], "enable_thinking": True})
    assert (shown["prompt"], shown["in_thinking"]) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True)
    assert shown["n_tokens"] == len(real.service.vocab.tokenize(shown["prompt"], True))
    assert post("/apply-template", {"messages": []})["error"]["rule"] == "M020"
    whole = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "temperature": 0, "stream": True, "max_tokens": 5}
    assert "get_weather" in post("/apply-template", whole)["prompt"]
    assert "get_weather" not in post("/apply-template", {**whole, "tool_choice": "none"})["prompt"]


def test_the_openai_client_parses_answers_into_its_own_types(real: Running) -> None:
    from pydantic import BaseModel

    class Capital(BaseModel):
        country: str
        city: str

    try:
        answer = real.client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": CAPITAL}], response_format=Capital, temperature=0, max_tokens=300,
            extra_body={"enable_thinking": False},
        )  # fmt: skip
    except openai.LengthFinishReasonError:
        return  # a small model may go on and on inside a string
    assert isinstance(answer.choices[0].message.parsed, Capital)
