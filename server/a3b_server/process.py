"""The engine's own process: loads, tells that it is ready, then obeys commands between two calls of llama_decode.

A process of its own, because llama.cpp answers some failures with an abort, because decoding and HTTP would wait for each
other's turn with the interpreter, and because only the end of a process surely gives a GPU's memory back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import psutil

from a3b_gguf.errors import A3BError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.llama.buffers import printed_buffers
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.pooling import Pooler, open_pooling
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.split import read_parts
from a3b_server.calls import Limits
from a3b_server.clip import Clip
from a3b_server.drafts import Drafter, PromptLookup
from a3b_server.embedder import Embedder
from a3b_server.engine import Engine, Options
from a3b_server.first_call import first_call
from a3b_server.garbage import settle
from a3b_server.messages import Cancel, Command, Dead, Embed, EngineConfig, Facts, Look, Ready, Snapshot, Stop, Submit
from a3b_server.mtp import MtpDrafter
from a3b_server.saved_texts import SavedTexts
from a3b_server.state_folder import StateFolder
from a3b_server.text_memory import TextMemory
from a3b_server.text_store import TextStore

SWITCH_SECONDS = 0.001  # how long another Python thread may keep a finished call of llama_decode waiting


def run_engine(pipe: Connection, config: EngineConfig) -> None:
    """Target of the process. `pipe` is the only way in and out; its end ends the process at once, whatever it does."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # a terminal and systemd signal the whole group; the parent drains, then says Stop
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start a debugger first
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="commands", daemon=True).start()
    started = time.perf_counter()
    try:
        with ExitStack() as owned:
            owned.enter_context(LlamaLog(limit=1000))
            model = owned.enter_context(load_model(config.model, config.params))
            if config.pools:
                _serve_pooling(model, config, inbox, pipe, started)
                return
            clip = Clip(config.clip) if config.clip else None
            context = owned.enter_context(open_context(model, config.params, clip.gate if clip else None))
            limits = _limits(config, model, context)
            drafter, contexts = _drafter(config, model, context, limits, owned)
            engine = Engine(context, Vocab(model), limits, _options(config), pipe.send, drafter)
            store = _store(config)
            if store is not None:
                owned.callback(store.close)
                engine.slots.saved = SavedTexts(context, store, engine.slots.checkpoints, drafter)
            first_call(context, limits)
            settle()
            pipe.send((Ready(_facts(limits, model, (context, *contexts), time.perf_counter() - started)),))
            _serve(engine, lambda: engine.scheduler.is_idle, inbox, pipe, clip)
    except A3BError as error:
        pipe.send((Dead(error.message, error.hint, error.exit_code),))


def _store(config: EngineConfig) -> TextStore | None:
    """Where texts are kept that lose their slot. One from a disk fits only into a cache of the same kind, on the same model."""
    params, states = config.params, config.states
    if states is None:
        return TextMemory(params.text_bytes) if params.text_bytes else None
    how = (params.kv_type_k, params.kv_type_v, params.kv_unified, params.flash_attn, params.n_expert_used, config.clip)
    files = [part.path for part in read_parts(config.model)]
    return StateFolder(states.folder, states.limit, fingerprint(files, *map(str, how)).hex())


def _serve_pooling(model: LoadedModel, config: EngineConfig, inbox: SimpleQueue[Command], pipe: Connection, started: float) -> None:
    context, params = open_pooling(model, config.params)
    with context:
        pooler = Pooler(context, params)
        embedder = Embedder(pooler, pipe.send)
        limits = Limits(context.n_ctx, pooler.most, params.n_seq_max, params.n_batch, params.n_outputs_max, Vocab(model).n_tokens)
        facts = _facts(limits, model, (context,), time.perf_counter() - started)
        pipe.send((Ready(replace(facts, n_embd=pooler.n_embd)),))
        _serve(embedder, lambda: embedder.is_idle, inbox, pipe, None)


def _options(config: EngineConfig) -> Options:
    params = config.params
    return Options(params.n_ubatch, params.kv_unified, params.reproducible, params.checkpoint_bytes, flash_attn=params.flash_attn)


def _drafter(
    config: EngineConfig, model: LoadedModel, context: Context, limits: Limits, owned: ExitStack
) -> tuple[Drafter | None, tuple[Context, ...]]:
    """Who guesses ahead, and the contexts that were opened for it: the model's MTP block where it was loaded, else the text so far."""
    params = config.params
    if not params.n_draft:
        return None, ()
    if params.load_mtp and model.n_layer_nextn:
        own = owned.enter_context(open_context(model, params, mtp=True))
        return MtpDrafter(context, own, limits, params.n_draft), (own,)
    return PromptLookup(params.n_draft), ()


def _read(pipe: Connection, inbox: SimpleQueue[Command]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone; nothing here is worth saving, and the other thread may be deep in C


class Worker(Protocol):
    """What obeys commands: an Engine, or an Embedder."""

    def submit(self, request: Any) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> None: ...
    def look(self) -> Snapshot: ...
    def close(self) -> None: ...


def _serve(
    engine: Worker, is_idle: Callable[[], bool], inbox: SimpleQueue[Command], pipe: Connection, clip: Clip | None
) -> None:
    while True:
        try:
            command = inbox.get(block=is_idle())
        except Empty:
            if clip:
                clip.turn()
            engine.step()
            continue
        match command:
            case Submit() | Embed():
                engine.submit(command)
            case Cancel(request_id):
                engine.cancel(request_id)
            case Look():
                pipe.send((replace(engine.look(), clip=clip.counts if clip else None),))
            case Stop():
                engine.close()
                return


def _limits(config: EngineConfig, model: LoadedModel, context: Context) -> Limits:
    params = config.params
    return Limits(context.n_ctx, context.n_ctx_seq, params.n_seq_max, params.n_batch, params.n_outputs_max, Vocab(model).n_tokens)


def _facts(limits: Limits, model: LoadedModel, contexts: tuple[Context, ...], seconds: float) -> Facts:
    buffers = printed_buffers([*model.log, *(line for context in contexts for line in context.log)])
    held = int(psutil.Process().memory_info().rss)
    return Facts(limits.n_ctx, limits.n_ctx_seq, limits.n_seq_max, buffers, model.n_moved, seconds, held)
