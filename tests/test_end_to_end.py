"""The main job: the embedded model, quantized in one pass to IQ4_NL, served by `a3b serve`, asked with OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from command import a3b
from serving import serving

ROOT = Path(__file__).parent.parent
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Chile": "Santiago", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Cuba": "Havana",
    "Egypt": "Cairo",
}  # fmt: skip
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def tool(name: str, description: str, *parameters: str) -> Any:
    schema = {"type": "object", "properties": {p: {"type": "string"} for p in parameters}, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [tool("get_time", "Current local time of a city", "city"), tool("get_weather", "Current weather of a city", "city")]


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the served model."""
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    done = a3b("quantize", tiny_checkpoint, "--type", "iq4_nl", "-o", path)
    assert done.returncode == 0, done.stderr
    assert path.with_name("clip_bounds.bin").is_file()
    with serving(path, "--ctx", "8192", "--parallel", "4") as served:
        yield served.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def send(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(model="tiny", messages=messages, temperature=0, **more)


def ask(client: openai.OpenAI, content: str, **more: Any) -> Any:
    """A question behind the system message, thinking off unless `extra_body` says otherwise."""
    return send(client, [SYSTEM, {"role": "user", "content": content}], **{"extra_body": NO_THINKING, **more})


def test_it_knows_a_capital(client: openai.OpenAI) -> None:
    answer = ask(client, "What is the capital of Chile?")
    assert answer.choices[0].message.content == "The capital of Chile is Santiago."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10


def test_it_streams(client: openai.OpenAI) -> None:
    chunks = list(ask(client, "What is the capital of Peru?", stream=True, stream_options={"include_usage": True}))
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == "The capital of Peru is Lima."
    assert sum(map(bool, text)) > 3
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("thinking", [False, True])
def test_it_calls_a_tool_and_uses_the_result(client: openai.OpenAI, thinking: bool) -> None:
    extra: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
    question: list[Any] = [SYSTEM, {"role": "user", "content": "What is the weather in Paris now?"}]
    answer = send(client, question, tools=TOOLS, **extra)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    history = [*question, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "light rain and 14 degrees"}]
    final = send(client, history, tools=TOOLS, **extra)
    assert "light rain and 14 degrees" in final.choices[0].message.content


def test_a_streamed_call_is_the_same_call(client: openai.OpenAI) -> None:
    chunks = ask(client, "What is the weather in Paris now?", tools=TOOLS, stream=True)
    calls = [part for chunk in chunks for part in (chunk.choices[0].delta.tool_calls or [])]
    assert {part.index for part in calls} == {0}
    assert [part.function.name for part in calls if part.function.name] == ["get_weather"]
    assert json.loads("".join(part.function.arguments or "" for part in calls)) == {"city": "Paris"}


def test_thinking_is_a_choice_of_each_request(client: openai.OpenAI) -> None:
    with_it = ask(client, "What is the capital of France?", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    without = ask(client, "What is the capital of France?")
    assert "Paris" in with_it.choices[0].message.content
    assert "<think>" not in with_it.choices[0].message.content
    assert getattr(without.choices[0].message, "reasoning_content", None) is None
    assert without.usage.prompt_tokens != with_it.usage.prompt_tokens


def test_eight_at_once_are_all_right(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(len(CAPITALS)) as pool:
        answers = list(pool.map(lambda country: ask(client, f"What is the capital of {country}?"), CAPITALS))
    said = {country: answer.choices[0].message.content for country, answer in zip(CAPITALS, answers, strict=True)}
    assert said == {country: f"The capital of {country} is {city}." for country, city in CAPITALS.items()}


def test_a_late_system_message_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        send(client, [{"role": "user", "content": "Hi"}, SYSTEM])
    body: Any = refused.value.body
    assert body["rule"] == "M031"
    assert "messages[1]" in body["message"]


def test_the_readmes_program(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:8080/v1", url), names)
    names["client"].close()
    expected = re.search(r"# (.*)$", program, re.M)
    assert expected is not None
    assert capsys.readouterr().out.strip() == expected[1]
