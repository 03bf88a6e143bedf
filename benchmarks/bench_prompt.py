"""Prompt checks: cold times of `a3b verify-prompt`, messages a second as a library, what a rendering and its tokens cost.

Limits: 0.3 s cold without a model, 1 s with one (a header with a vocabulary of 248,320 tokens), 20,000 ordinary messages a second on
one core, half as much time again for tokenizing apart as for tokenizing whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from a3b_gguf.flows.prompts import speaker_of, text_side  # noqa: E402
from a3b_gguf.gguf_write import write_gguf  # noqa: E402
from a3b_gguf.metadata import string  # noqa: E402
from a3b_gguf.prompt import PROFILES, Rendered, refused, render_request, tokenize_rendered, verify_body, verify_request  # noqa: E402
from a3b_gguf.template import GuardedTemplate, open_template, published_text  # noqa: E402
from true_header import metadata_35b  # noqa: E402

COLD_LIMIT_S, MODEL_LIMIT_S, MESSAGES_LIMIT, APART_LIMIT, RUNS = 0.3, 1.0, 20_000, 1.5, 7
SENTENCE = "The quick brown fox jumps over the lazy dog, and then it asks what the weather in Santiago is like. "
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
for _ in range(10):
    CHAT += [{"role": "user", "content": SENTENCE * 2}, {"role": "assistant", "content": SENTENCE * 5}]
CHAT.append({"role": "user", "content": SENTENCE})


def cold(*words: str, given: str) -> float:
    """Wall time of a whole process, the best of several: what else the machine does is no part of it."""
    command = [str(Path(sys.executable).parent / "a3b"), "verify-prompt", *words]
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, input=given, text=True, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def each(function: Callable[[], object], seconds: float = 1.0) -> float:
    """Seconds a call, the best of five stretches."""
    count, best = 1, float("inf")
    while True:
        start = time.perf_counter()
        for _ in range(count):
            function()
        taken = time.perf_counter() - start
        if taken > seconds / 10:
            break
        count *= 2
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def main() -> int:
    failed: list[str] = []

    def line(name: str, value: str, limit: str = "", ok: bool = True) -> None:
        print(f"{name:<52}{value:>18}   {limit}{'' if ok else '   MISSED'}")
        if not ok:
            failed.append(name)

    given = json.dumps(CHAT[:2])
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "35b.gguf"
        template = string(published_text("qwen3.6") + "{# a patched one, so that it is guarded and probed #}")
        write_gguf(big, {**metadata_35b(248_320, 25), "tokenizer.chat_template": template}, [])
        without, with_model = cold("-", given=given), cold("-", "--model", str(big), given=given)
    line("cold, a profile", f"{without:.3f} s", f"limit {COLD_LIMIT_S} s", without <= COLD_LIMIT_S)
    line("cold, a model of 248,320 tokens", f"{with_model:.3f} s", f"limit {MODEL_LIMIT_S} s", with_model <= MODEL_LIMIT_S)

    profile, request = PROFILES["qwen3.6"], {"messages": CHAT}
    assert not refused(verify_request(request, profile))
    checked = len(CHAT) / each(lambda: verify_request(request, profile))
    line("messages a second, checked", f"{checked:,.0f}", f"limit {MESSAGES_LIMIT:,}", checked >= MESSAGES_LIMIT)
    body = json.dumps(request).encode()
    both = len(CHAT) / each(lambda: verify_request(verify_body(body)[0], profile))
    line("messages a second, read from JSON and checked", f"{both:,.0f}", f"limit {MESSAGES_LIMIT:,}", both >= MESSAGES_LIMIT)

    known, guarded = open_template(published_text("qwen3.6")), GuardedTemplate(published_text("qwen3.6") + "{# #}")
    line(f"rendering {len(CHAT)} messages, known template", f"{1e3 * each(lambda: render_request(known, request)):.2f} ms")
    line(f"rendering {len(CHAT)} messages, in its own process", f"{1e3 * each(lambda: render_request(guarded, request)):.2f} ms")
    guarded.close()

    with tempfile.TemporaryDirectory() as folder:
        from a3b_convert import convert

        convert(ROOT / "models" / "tiny-a3b", Path(folder) / "tiny.gguf")
        speaker = speaker_of(Path(folder) / "tiny.gguf")
        text = render_request(known, request)
        at = text.index("Santiago")
        with text_side(speaker) as side:
            pairs = [
                (
                    each(lambda: side.vocab.tokenize(text, True), 0.2),
                    each(lambda: tokenize_rendered(Rendered(text, ((at, at + 8),)), side.vocab, side.controls), 0.2),
                )
                for _ in range(5)
            ]
            whole, apart = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    line(f"tokenizing {len(text):,} characters whole", f"{1e3 * whole:.2f} ms")
    line("the same, content apart", f"{1e3 * apart:.2f} ms", f"limit {APART_LIMIT:g} times", apart <= APART_LIMIT * whole)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
