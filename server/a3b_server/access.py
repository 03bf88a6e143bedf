"""Who may ask: web pages by their origin, clients by their key. What could never match is refused before the server starts."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address

from a3b_gguf.errors import UsageError

ANY_ORIGIN = "*"
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9_~-]+(?:\.[a-z0-9_~-]+)*\.?)(?::([0-9]{1,5}))?", re.ASCII)
DEFAULT_PORTS = {"http": 80, "https": 443}  # which browsers leave out


def origin(text: str) -> str:
    """`text` as browsers name the origin of a page (RFC 6454, section 6.2): in lower case, without the port that goes without saying.

    `*` stands for all pages. Raises UsageError for what no browser would ever send.
    """
    if text == ANY_ORIGIN:
        return text
    found = ORIGIN.fullmatch(text.lower())
    host = _host(found[2]) if found else None
    if found is None or host is None or not 0 < int(found[3] or 1) <= 65535:
        hint = "scheme://host or scheme://host:port without a path, like https://page.example or http://localhost:3000; * is every page"
        raise UsageError(f"--cors: {text!r} is no origin of a web page", f"{hint}; repeat --cors for several")
    port = int(found[3] or 0)
    return f"{found[1]}://{host}" + (f":{port}" if port not in (0, DEFAULT_PORTS.get(found[1])) else "")


def _host(text: str) -> str | None:
    if not text.startswith("["):
        return text
    try:
        return f"[{IPv6Address(text[1:-1]).compressed}]"
    except AddressValueError:
        return None


def api_key(text: str) -> str:
    """`text`, which a client can send after `Authorization: Bearer`. Raises UsageError, which does not repeat it."""
    if not text:
        raise UsageError("--api-key: a key is empty, which would let in whoever sends none", "give a key, or leave the flag out")
    if text != text.strip() or not text.isprintable():
        raise UsageError("--api-key: a key has spaces at an end, or characters that no header can carry", "use letters, digits, - and _")
    return text
