"""POST /v1/embeddings: vectors equal to llama.cpp's own server's, in OpenAI's shape, and clear words where a model has none."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.pooling import Pooler, open_pooling, pooling_of
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.template import open_template, published_text
from a3b_server.app import create_app
from a3b_server.embedder import Embedder
from a3b_server.messages import Embed, Embedded, EngineConfig, Event, Failed
from a3b_server.process import run_engine
from a3b_server.supervisor import Supervisor
from chat_server import MODEL, Running, chat_server, service_of, wait_until_settled
from pooling_models import RANK, TEXTS, encoder, make_all
from served import served
from test_server_ops import numbers

GOLDEN = json.loads((Path(__file__).parent / "golden" / "embeddings_llama_server.json").read_text())
CLOSE = 5e-5  # of vectors of length 1
CLOSE_LONG = 2e-3  # where the text was cut into two calls, which round differently
PARAMS = LoadParams(n_ctx=512, n_batch=256, n_ubatch=256)


@pytest.fixture(scope="module")
def models(tiny_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_all(tmp_path_factory.mktemp("pooling"), tiny_bf16)


def vectors_of(path: Path, params: LoadParams) -> dict[bool, NDArray[np.float32]]:
    """Vectors of TEXTS; True: of as many together as fit into a call, which are all but the longest, and none on a hybrid."""
    with LlamaLog(), load_model(path, params) as model:
        context, opened = open_pooling(model, params)
        with context:
            pooler, vocab = Pooler(context, opened), Vocab(model)
            texts = [vocab.tokenize(text, False, True) for text in TEXTS]
            assert pooler.fit([len(text) for text in texts[:4]]) is not model.is_hybrid
            ways = {False: [[text] for text in texts], **({} if model.is_hybrid else {True: [texts[:4], texts[4:]]})}
            found = {together: [pooler.pool(group) for group in groups] for together, groups in ways.items()}
    return {together: np.concatenate(cast(list[NDArray[np.float32]], vectors)) for together, vectors in found.items()}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_vectors_are_those_of_llama_server(models: dict[str, Path], name: str) -> None:
    wanted = np.array(GOLDEN[name])
    assert np.allclose(np.linalg.norm(wanted, axis=1), 1, atol=1e-3)
    assert np.abs(wanted[0] - wanted[1]).max() > 20 * CLOSE_LONG, "texts differ"
    params = replace(PARAMS, n_batch=64, n_ubatch=64) if name.endswith("last") else PARAMS  # the longest text then takes two calls
    for together, found in vectors_of(models[name], params).items():
        apart = np.abs(found - wanted).max(axis=1)
        assert apart[:4].max() < CLOSE, (together, apart)
        assert apart[4] < (CLOSE_LONG if params.n_ubatch == 64 else CLOSE), (together, apart)


def test_what_a_file_says_of_pooling(models: dict[str, Path], tiny_bf16: Path, tmp_path: Path) -> None:
    assert pooling_of(read_gguf(tiny_bf16)) is None
    assert [pooling_of(read_gguf(models[f"encoder-{way}"])) for way in ("mean", "cls")] == ["mean", "cls"]
    with pytest.raises(BadInput, match="ranks documents, which is not served"):
        pooling_of(read_gguf(encoder(tmp_path / "rank.gguf", RANK)))


class FakePooler:
    """Gives the number of tokens as the vector. Two texts and ten tokens fit; a text that begins with 13 fails."""

    most = 8

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def fit(self, lengths: Sequence[int]) -> bool:
        return len(lengths) <= 2 and sum(lengths) <= 10

    def pool(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32] | None:
        self.calls.append([len(text) for text in texts])
        return None if texts[0][0] == 13 else np.array([[len(text)] for text in texts], np.float32)


def test_requests_take_turns_and_end_once() -> None:
    pooler, events = FakePooler(), list[Event]()
    embedder = Embedder(cast(Pooler, pooler), events.extend)
    embedder.submit(Embed("long", tuple((1,) * n for n in (5, 6, 7, 8))))
    embedder.submit(Embed("short", ((1,) * 2, (1,) * 3)))
    embedder.submit(Embed("empty", ((),)))
    embedder.submit(Embed("large", ((1,), (1,) * 9)))
    embedder.submit(Embed("none", ()))
    assert [event.id for event in events if isinstance(event, Failed)] == ["empty", "large", "none"]
    events.clear()
    while not embedder.is_idle:
        embedder.step()
    ends = {event.id: [struct.unpack("<f", v)[0] for v in event.vectors] for event in events if isinstance(event, Embedded)}
    assert ends == {"long": [5, 6, 7, 8], "short": [2, 3]}
    assert [event.id for event in events if isinstance(event, Embedded)] == ["short", "long"]
    assert pooler.calls == [[5, 2], [3, 6], [7], [8]]
    assert (embedder.look().n_waiting, embedder.look().counts.n_requests, embedder.look().counts.n_read) == (0, 2, 31)


def test_what_fails_or_is_cancelled_ends_alone() -> None:
    events = list[Event]()
    embedder = Embedder(cast(Pooler, FakePooler()), events.extend)
    for name, first in (("bad", 13), ("good", 1), ("gone", 1)):
        embedder.submit(Embed(name, ((first,) * 6,)))
    embedder.cancel("gone")
    embedder.cancel("gone")
    while not embedder.is_idle:
        embedder.step()
    assert [(type(event), event.id) for event in events if isinstance(event, Failed | Embedded)] == [
        (Failed, "gone"), (Failed, "bad"), (Embedded, "good"),
    ]  # fmt: skip
    embedder.submit(Embed("late", ((1,),)))
    embedder.close()
    assert embedder.is_idle


@pytest.fixture(scope="module")
def pooling(models: dict[str, Path]) -> Iterator[Running]:
    path = models["encoder-cls"]
    with load_model(path, LoadParams(n_ctx=256), vocab_only=True) as loaded:
        supervisor = Supervisor(run_engine, EngineConfig(path, PARAMS, pools=True))
        service = replace(service_of(supervisor, Vocab(loaded), open_template(published_text("qwen3.6"))), pools=True)
        with served(create_app(service, supervisor)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            wait_until_settled(client, url)
            yield Running(url, client, service, supervisor)


def test_the_openai_client_gets_vectors(pooling: Running) -> None:
    wanted, near = np.array(GOLDEN["encoder-cls"]), 1e-3  # rows of several texts round differently
    one = pooling.client.embeddings.create(model=MODEL, input=TEXTS[0])  # the client asks for base64 by itself
    assert np.abs(np.array(one.data[0].embedding) - wanted[0]).max() < near
    assert (one.usage.prompt_tokens, one.usage.total_tokens) == (9, 9)
    all_of_them = pooling.client.embeddings.create(model=MODEL, input=list(TEXTS), encoding_format="float")
    assert [entry.index for entry in all_of_them.data] == [0, 1, 2, 3, 4]
    assert np.abs(np.array([entry.embedding for entry in all_of_them.data]) - wanted).max() < near
    tokens = [pooling.service.vocab.tokenize(text, False, True) for text in TEXTS]
    assert all_of_them.usage.prompt_tokens == sum(map(len, tokens))
    by_tokens = pooling.client.embeddings.create(model=MODEL, input=tokens, dimensions=64)
    assert np.abs(np.array([entry.embedding for entry in by_tokens.data]) - wanted).max() < near
    alone = pooling.client.embeddings.create(model=MODEL, input=tokens[1])
    assert np.abs(np.array(alone.data[0].embedding) - wanted[1]).max() < near


def post(running: Running, path: str, body: Any) -> tuple[int, Any]:
    answer = running.client._client.post(f"{running.url}{path}", json=body)
    return answer.status_code, answer.json()


def test_numbers_and_base64_are_the_same_vector(pooling: Running) -> None:
    _, plain = post(pooling, "/v1/embeddings", {"input": "a dog"})
    _, coded = post(pooling, "/v1/embeddings", {"input": ["a dog"], "encoding_format": "base64"})
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert list(struct.unpack("<64f", raw)) == plain["data"][0]["embedding"]
    assert (plain["object"], plain["data"][0]["object"], plain["model"]) == ("list", "embedding", MODEL)
    found = numbers(pooling.client._client.get(f"{pooling.url}/metrics").text)
    assert found["a3b_requests_total{embedded}"] >= 2


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({}, "invalid_value", "input: expected text"),
        ({"input": ""}, "invalid_value", "not empty"),
        ({"input": []}, "invalid_value", "input: expected text"),
        ({"input": ["a", ""]}, "invalid_value", "input.1: expected text"),
        ({"input": ["a", 5]}, "invalid_value", "input.1: expected text"),
        ({"input": [[1, 2], [1, 999]]}, "invalid_value", "input.1: 999 is no token"),
        ({"input": [-1]}, "invalid_value", "input: -1 is no token"),
        ({"input": "cat " * 200}, "context_length_exceeded", "202 tokens, a text may have 128"),
        ({"input": ["a"] * 2049}, "invalid_value", "2,049 texts, at most 2,048"),
        ({"input": "a", "dimensions": 32}, "unsupported_parameter", "have 64 numbers"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "temperature": 1}, "unknown_parameter", "temperature"),
    ],
)
def test_texts_that_get_no_vector(pooling: Running, body: dict[str, Any], code: str, words: str) -> None:
    status, answer = post(pooling, "/v1/embeddings", body)
    assert (status, answer["error"]["code"], words in answer["error"]["message"]) == (400, code, True), answer


def test_a_model_that_pools_writes_nothing_and_says_where_to_go(pooling: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", asked), ("/v1/completions", {"prompt": "a"}), ("/apply-template", asked)):
        status, answer = post(pooling, path, body)
        assert (status, answer["error"]["code"]) == (400, "model_writes_no_text")
        assert "POST /v1/embeddings" in answer["error"]["message"]
    assert post(pooling, "/tokenize", {"content": "a dog"})[0] == 200
    assert pooling.client._client.get(f"{pooling.url}/slots").json()["slots"] == []


def test_a_model_that_writes_has_no_vectors_and_says_why(tiny_bf16: Path) -> None:
    with chat_server(tiny_bf16) as running:
        status, answer = post(running, "/v1/embeddings", {"input": "a"})
        assert (status, answer["error"]["code"]) == (400, "model_does_not_pool")
        assert "serve an embedding model" in answer["error"]["message"]
