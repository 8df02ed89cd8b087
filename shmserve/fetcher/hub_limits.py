"""Limits for Hugging Face's library, which waits without deadlines.

The library's functions are synchronous, so no other thread can interrupt a call. But each request
passes the hooks of the library's HTTP client. The hooks limit the wait for each piece of an answer,
and end a call at the deadline or after too many bytes. The library calls the hooks in the thread of
the call, where `limited` has set the call's limits.

The library sleeps as long as an answer with status 429 or 503 demands. The hooks remove the
demand, so the library's own pauses hold (8 s at most).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from shmserve.errors import DeadlineExceeded, Unavailable

_DEMANDS = ("Retry-After", "ratelimit")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class CallLimits(Struct):
    """Limits of one call of the library: deadline (`time.monotonic`), bytes still allowed in
    answers without a range, and the error at the deadline."""

    until: float
    remaining: int
    late: str

    def check(self) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        if time.monotonic() > self.until:
            raise DeadlineExceeded(self.late)


_thread = threading.local()


@contextmanager
def limited(limits: CallLimits) -> Iterator[None]:
    """Apply limits to all requests that the library makes in this thread."""
    _thread.limits = limits
    try:
        yield
    finally:
        _thread.limits = None


def bound(silence_s: float) -> None:
    """Have the library use a client with the limits of this module. `silence_s`: longest wait for
    a piece of an answer, in seconds."""
    # The library reads these at import, as whole seconds
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(max(1, round(silence_s))))
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(max(1, round(silence_s))))
    try:
        from huggingface_hub import constants, set_client_factory
        from huggingface_hub.utils import _http
    except ImportError:  # fsspec reports missing packages
        return
    set_client_factory(lambda: _client(_http.default_client_factory, silence_s, constants.ENDPOINT))


def _client(make: Callable[[], Any], silence_s: float, endpoint: str) -> Any:
    made = make()
    library = sys.modules[type(made).__module__.partition(".")[0]]  # httpx or httpx2
    home = library.URL(endpoint)
    watched = _watched(library.SyncByteStream)

    def before(request: Any) -> None:
        limits: CallLimits | None = getattr(_thread, "limits", None)
        wait_s = silence_s
        if limits is not None:
            limits.check()
            wait_s = max(0.1, min(silence_s, limits.until - time.monotonic()))
        # the library lists with `timeout=None`, which overrides the client's own timeout
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), wait_s)
        if (request.url.scheme, request.url.netloc) != (home.scheme, home.netloc):
            # the next page of a listing may lie anywhere, and the library sends the token along
            request.headers.pop("Authorization", None)

    def after(response: Any) -> None:
        for name in _DEMANDS:
            response.headers.pop(name, None)
        limits: CallLimits | None = getattr(_thread, "limits", None)
        if limits is not None:
            wanted = _RANGE.fullmatch(response.request.headers.get("Range", ""))
            is_content = wanted is not None and response.status_code in (200, 206)
            most = int(wanted[2]) - int(wanted[1]) + 1 if wanted and is_content else None
            response.stream = watched(response.stream, limits, most)

    made.timeout = silence_s
    made.event_hooks = {
        "request": [*made.event_hooks["request"], before],
        "response": [*made.event_hooks["response"], after],
    }
    return made


def _watched(base: type[Any]) -> type[Any]:
    """Return a class of response bodies that checks limits. `base`: the HTTP library's own."""

    class Watched(base):  # type: ignore[misc]
        """Body of an answer. `most`: bytes of the requested range; None: no range was
        requested."""

        def __init__(self, body: Any, limits: CallLimits, most: int | None) -> None:
            self._body, self._limits, self._most = body, limits, most

        def __iter__(self) -> Iterator[bytes]:
            for piece in self._body:
                self._limits.check()
                self._count(len(piece))
                yield piece

        def _count(self, nbytes: int) -> None:
            if self._most is not None:
                self._most -= nbytes
            else:
                self._limits.remaining -= nbytes
            if self._limits.remaining < 0 or (self._most is not None and self._most < 0):
                raise Unavailable("the store answers with more bytes than were asked for")

        def close(self) -> None:
            self._body.close()

    return Watched
