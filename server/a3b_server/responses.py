"""JSON answers that can always be sent, whatever text of the client they quote."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from a3b_gguf.strict_json import dumps


class JSONAnswer(JSONResponse):
    """Starlette's own fails on half a surrogate pair, which JSON can hold and UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()
