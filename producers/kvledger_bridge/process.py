"""Which process an engine is, read from its own metrics page: the start time of the process (DESIGN §4, proof 2).

vLLM's server ends with its engine, so one start time is one life of the engine. Whatever leaves that open is None, and
None proves nothing: no answer, a redirect, a page without the start time (as servers of several processes have), or
with several (as pages that a sidecar merged have).
"""

from __future__ import annotations

import math
import re
import time
from http.client import HTTPException
from typing import Any
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

ANSWER_SECONDS = 1.0
"""For connecting, and for each further piece of the page: an engine's server is a hop away."""

PAGE_SECONDS = 2.0
"""For the whole page; below the time between two questions, so that these do not pile up."""

PAGE_BYTES_MAX = 8 * 2**20
"""vLLM's pages have some hundred kilobytes; above this the start time counts as unread."""

_PIECE_BYTES = 64 * 2**10

_START = re.compile(rb"^process_start_time_seconds(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)


class _Here(HTTPRedirectHandler):
    """Follows no redirect: where it leads may be another process."""

    def redirect_request(self, *_: Any) -> None:
        """None makes the redirect an error."""


HANDLERS = (ProxyHandler({}), _Here())
"""No proxy of the environment either: it might answer from memory."""

_OPENER = build_opener(*HANDLERS)


def process_start(page: bytes) -> str | None:
    """``process_start_time_seconds`` as the page writes it; None unless it stands there once. O(bytes)."""
    found = _START.findall(page)
    if len(found) != 1:
        return None
    text: str = found[0].decode(errors="replace")
    try:
        seconds = float(text)
    except ValueError:
        return None
    return text if math.isfinite(seconds) and seconds > 0 else None


def read_process(url: str) -> str | None:
    """The identity of the process that serves ``url``, an http or https one; None where it cannot be read.

    Blocks for about ``PAGE_SECONDS`` at most. Raises nothing that the network or the page can cause.
    """
    end = time.monotonic() + PAGE_SECONDS
    page = bytearray()
    try:
        with _OPENER.open(url, timeout=ANSWER_SECONDS) as response:
            while piece := response.read1(_PIECE_BYTES):
                page += piece
                if len(page) > PAGE_BYTES_MAX or time.monotonic() > end:
                    return None
    except (OSError, HTTPException, ValueError):
        return None
    return process_start(bytes(page))
