"""What a3b keeps for a user between runs: measurements that took time and can be taken again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's folder for a3b; it need not exist yet. XDG_CACHE_HOME: https://specifications.freedesktop.org/basedir-spec/

    A user without a home, as a container's may be, has /nonexistent, which cannot be made: what is kept there is measured again.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # stays ~ when nobody knows
    return Path(given if os.path.isabs(given) else f"{home if home != '~' else '/nonexistent'}/.cache") / "a3b"


def keep_text(file: Path, text: str) -> None:
    """Puts `text` in place of what `file` held, whole; its folder is made. Raises OSError. Not synced: it can be measured again."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")  # two runs may keep the same thing
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(text, encoding="utf-8")
    part.replace(file)
