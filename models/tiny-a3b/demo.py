"""The main job from end to end on the embedded model: convert, quantize with bounds, inspect, plan, verify a prompt, serve, ask.

    python models/tiny-a3b/demo.py          what `make demo` runs; files go to build/demo

Prints each command and what it says. Exits with 1 when an answer is not the right one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUT = Path("build/demo")
A3B = str(Path(sys.executable).parent / "a3b")
READY_LIMIT_S = 60
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Current weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(*words: str, expect: int = 0, given: str | None = None) -> None:
    """Shows and runs one a3b command; ends the demo when its exit code is not the expected one."""
    say(f"\n$ a3b {' '.join(words)}" + (f"      # standard input: {given}" if given else ""))
    done = subprocess.run([A3B, *words], input=given, text=True, stdin=None if given else subprocess.DEVNULL)
    if done.returncode != expect:
        sys.exit(f"demo: `a3b {words[0]}` ended with exit code {done.returncode}, expected {expect}")
    if expect:
        say(f"(exit code {expect})")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(model: Path, port: int) -> Iterator[str]:
    """A running `a3b serve` of `model`; yields its address once /health says ready."""
    words = ["serve", str(model), "--ctx", "64000", "--port", str(port)]
    say(f"\n$ a3b {' '.join(words)} &")
    # Threads that wait for each other by spinning are slow when anything else runs on a small machine.
    server = subprocess.Popen([A3B, *words])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_LIMIT_S
        while status(f"{url}/health") != 200:
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("demo: the server did not become ready")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def status(url: str) -> int:
    """HTTP status of a GET, 0 while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a chat completion, shown as the request and the part of the answer that matters."""
    say(f"\nPOST /v1/chat/completions {json.dumps(body, ensure_ascii=False)}")
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            code, data = answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        code, data = error.code, json.load(error)
    shown = data["error"] if "error" in data else data["choices"][0]
    say(f"-> {code} {json.dumps(shown, ensure_ascii=False)}")
    return code, data


def check(what: str, right: bool) -> None:
    say(f"   {'ok' if right else 'WRONG'}: {what}")
    if not right:
        sys.exit(f"demo: {what}: the answer is not the right one")


def main() -> None:
    started = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    bf16, quantized = OUT / "tiny-a3b-bf16.gguf", OUT / "tiny-a3b-iq4_nl.gguf"
    checkpoint = os.path.relpath(HERE)
    run("convert", checkpoint, "-o", str(bf16))
    run("quantize", checkpoint, "--type", "iq4_nl", "-o", str(quantized))
    run("inspect", str(quantized))
    run("plan", str(quantized), "--ctx", "64000", "--vram", "8GiB", "--ram", "16GiB")
    late = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
    run("verify-prompt", "-", "--model", str(quantized), expect=1, given=json.dumps(late))
    with served(quantized, free_port()) as url:
        off = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
        question = {"role": "user", "content": "What is the capital of Chile?"}
        _, answer = ask(url, {"messages": [SYSTEM, question], **off})
        check("the capital of Chile is Santiago", "Santiago" in (answer["choices"][0]["message"]["content"] or ""))
        question = {"role": "user", "content": "What is the weather in Paris now?"}
        _, answer = ask(url, {"messages": [SYSTEM, question], "tools": [WEATHER], **off})
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        check('get_weather is called with {"city":"Paris"}', found == [("get_weather", '{"city":"Paris"}')])
        code, answer = ask(url, {"messages": late})
        check("a late system message is refused with 400 and rule M031", code == 400 and answer["error"]["rule"] == "M031")
    say(f"\nDone in {time.monotonic() - started:.0f} s. The files are in {OUT}.")


if __name__ == "__main__":
    main()
