"""Runs an application on a free port, in a thread, for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from a3b_server.serve import listen
from a3b_server.slow import ImpatientProtocol


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Yields the base URL. Connections are accepted from the start; they wait until the application is up."""
    server = uvicorn.Server(uvicorn.Config(app, http=ImpatientProtocol, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
