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
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from a3b_gguf.errors import A3BError
from a3b_gguf.llama.buffers import printed_buffers
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.vocab import Vocab
from a3b_server.calls import Limits
from a3b_server.engine import Engine
from a3b_server.messages import Cancel, Command, Dead, EngineConfig, Facts, Ready, Stop, Submit

SWITCH_SECONDS = 0.001  # how long another Python thread may keep a finished call of llama_decode waiting


def run_engine(pipe: Connection, config: EngineConfig) -> None:
    """Target of the process. `pipe` is the only way in and out; its end ends the process at once, whatever it does."""
    for sort in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd signal the whole group; the parent drains, then says Stop
        signal.signal(sort, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start a debugger first
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="commands", daemon=True).start()
    started = time.perf_counter()
    try:
        with LlamaLog(limit=1000), load_model(config.model, config.params) as model, open_context(model, config.params) as context:
            limits = _limits(config, model, context)
            engine = Engine(context, Vocab(model), limits, config.params.n_ubatch, pipe.send)
            pipe.send((Ready(_facts(limits, model, context, time.perf_counter() - started)),))
            _serve(engine, inbox)
    except A3BError as error:
        pipe.send((Dead(error.message, error.hint, error.exit_code),))


def _read(pipe: Connection, inbox: SimpleQueue[Command]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone; nothing here is worth saving, and the other thread may be deep in C


def _serve(engine: Engine, inbox: SimpleQueue[Command]) -> None:
    while True:
        try:
            command = inbox.get(block=engine.scheduler.is_idle)
        except Empty:
            engine.step()
            continue
        match command:
            case Submit():
                engine.submit(command)
            case Cancel(request_id):
                engine.cancel(request_id)
            case Stop():
                engine.close()
                return


def _limits(config: EngineConfig, model: LoadedModel, context: Context) -> Limits:
    params = config.params
    return Limits(context.n_ctx, context.n_ctx_seq, params.n_seq_max, params.n_batch, params.n_outputs_max, Vocab(model).n_tokens)


def _facts(limits: Limits, model: LoadedModel, context: Context, seconds: float) -> Facts:
    buffers = printed_buffers((*model.log, *context.log))
    return Facts(limits.n_ctx, limits.n_ctx_seq, limits.n_seq_max, buffers, model.n_moved, seconds)
