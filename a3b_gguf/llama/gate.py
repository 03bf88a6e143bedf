"""An eval callback that costs nothing while nobody looks: compiled code asks a flag before Python is called.

llama.cpp calls it for every node of a graph, a few thousand times a token on a large model; a call into Python takes about 2 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Gate:
    """Owns the compiled callback and its flag. `address` and `user_data` are for llama.cpp; keep the Gate as long as the context."""

    def __init__(self, callback: Callable[[int, bool, Any], bool]) -> None:
        from numba import carray, cfunc, types, uint8

        self._python = python = SIGNATURE(callback)
        self._flag = np.zeros(1, np.uint8)

        def gate(node: Any, ask: Any, user: Any) -> Any:
            if carray(user, 1, uint8)[0] == 0:
                return not ask
            return python(node, ask, user)

        self._compiled: Any = cfunc(types.boolean(types.voidptr, types.boolean, types.voidptr))(gate)
        self.address = int(self._compiled.address)
        self.user_data = int(self._flag.ctypes.data)

    def open(self, is_open: bool) -> None:
        """Whether Python is called from now on. Change it between two calls of llama_decode."""
        self._flag[0] = is_open
