"""A folder of saved texts that keeps to a size: the one that was not used for the longest time gives way."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from a3b_server.state_file import BadState, OtherModel, read_text, read_tokens, write_text
from a3b_server.text_store import Bytes, Entry, SavedText, entry_of

SUFFIX = ".a3btext"


def tell(message: str) -> None:
    """Nothing that is wrong with a saved text is a reason to stop: it is said, and the text is read again."""
    sys.stderr.write(f"note: {message}\n")


class StateFolder:
    """Owns the files of one model in `folder`, which must be there. Files are written one at a time beside everything else.

    fingerprint: of the model and how it is loaded; texts of others stay as long as there is room.
    """

    outlives = True

    def __init__(self, folder: Path, limit: int, fingerprint: str, note: Callable[[str], None] = tell) -> None:
        self._folder, self._limit, self._fingerprint, self._note = folder, limit, fingerprint, note
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._writing: Future[None] | None = None
        self.entries: dict[str, Entry] = {}  # by the file's name
        self._clear_parts()
        n_others = sum(not self._look(path) for path in self._files())
        if n_others:
            note(f"{folder}: {n_others} saved texts are of other models, or of other types of cache, and are left out")

    def _clear_parts(self) -> None:
        """Removes what processes that were killed have left unfinished."""
        for path in self._folder.glob(f"*{SUFFIX}.*.part"):
            pid = path.name.split(".")[-2]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Oldest first."""
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            try:
                about = path.stat()
            except OSError:  # another server has just removed it
                continue
            if stat.S_ISREG(about.st_mode):
                found.append((about.st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _look(self, path: Path) -> bool:
        """Takes the file in where it can be used; False for one of another model."""
        try:
            header, tokens = read_tokens(path, self._fingerprint)
        except OtherModel:
            return False
        except (BadState, OSError) as error:
            self._note(f"{path} is left out: {error}")
            return True
        self.entries[path.name] = Entry(path.name, tokens, header.n_exact, tuple(count for count, _ in header.checkpoints))
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a text is still being written."""
        return self._writing is not None and not self._writing.done()

    def room(self, n_bytes: int, spared: Entry | None = None) -> Bytes | None:
        """Memory of its own for every text, since a thread writes it later."""
        return np.empty(n_bytes, np.uint8) if n_bytes <= self._limit else None

    def load(self, entry: Entry) -> SavedText | None:
        """The text; None when its file is not what it was."""
        path = self._folder / entry.name
        try:
            text = read_text(path, self._fingerprint)
            os.utime(path)
        except (BadState, OSError) as error:
            self.entries.pop(entry.name, None)
            self._note(f"{path} is left out: {error}")
            return None
        return text

    def save(self, text: SavedText) -> bool:
        """Writes the text in the background, after the one before it. False: it is larger than all the room there is."""
        if text.n_bytes > self._limit:
            return False
        self._writing = self._writer.submit(self._write, text)
        return True

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()

    def _write(self, text: SavedText) -> None:
        digest = hashlib.sha256(self._fingerprint.encode() + np.array(text.tokens, "<i4").tobytes()).hexdigest()
        path = self._folder / f"{digest[:32]}{SUFFIX}"
        try:
            self._make_room(text.n_bytes, path)
            write_text(path, text, self._fingerprint)
        except OSError as error:
            self._note(f"a text of {len(text.tokens):,} tokens was not saved to {path}: {error.strerror or error}")
            return
        for other in [e for e in tuple(self.entries.values()) if e.name != path.name and text.tokens[: len(e.tokens)] == e.tokens]:
            self._remove(self._folder / other.name)  # the new one goes on from it
        self.entries[path.name] = entry_of(path.name, text)

    def _make_room(self, n_bytes: int, path: Path) -> None:
        sizes = {file: file.stat().st_size for file in self._files() if file != path}
        held = sum(sizes.values())
        for file, size in sizes.items():
            if held + n_bytes <= self._limit:
                return
            self._remove(file)
            held -= size

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.entries.pop(path.name, None)
