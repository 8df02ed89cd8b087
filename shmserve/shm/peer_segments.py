"""Segments of peers that this process has mapped, and views into these segments.

Keyed by the peer process: a segment is mapped once, whichever channel brought the fd. Descriptors
are checked against the announced sizes, never against data in shared memory.
"""

import os
import threading
from collections.abc import Iterable, Sequence

from shmserve.errors import ProtocolViolation
from shmserve.protocol.control.data_messages import Descriptor, SegmentOffer
from shmserve.shm.mappings import Mappings
from shmserve.shm.segment import Mapping


class PeerSegments:
    """Segments of one peer process. `keep`: keep the segments' descriptors, too, to pass them on.
    `mappings`: record of the process's mappings."""

    def __init__(self, keep: bool = False, mappings: Mappings | None = None) -> None:
        self._keep = keep
        self._book = mappings
        self._mappings: dict[int, Mapping] = {}
        self._lock = threading.Lock()

    def accept(self, offers: Sequence[SegmentOffer], fds: Sequence[int]) -> None:
        """Map the segments that a message offers. The fds are closed in any case. Raise
        ProtocolViolation if fds and offers do not match, or an fd cannot be mapped."""
        try:
            if len(offers) != len(fds):
                raise ProtocolViolation(f"{len(offers)} segments offered with {len(fds)} fds")
            for offer, fd in zip(offers, fds, strict=True):
                with self._lock:
                    if offer.segment not in self._mappings:
                        self._mappings[offer.segment] = self._mapped(fd, offer.size)
        except OSError as ex:
            raise ProtocolViolation(f"an offered segment cannot be mapped: {ex.strerror}") from ex
        finally:
            for fd in fds:
                os.close(fd)

    def _mapped(self, fd: int, size: int) -> Mapping:
        book = self._book
        if book is None:
            return Mapping(fd, size, self._keep)
        mapping = Mapping(fd, size, self._keep or book.pins_writable_only)
        again = mapping.writable if book.pins_writable_only else None
        book.mapped(mapping.address, size, writable=False, again=again)
        return mapping

    def drop(self, segments: Iterable[int]) -> None:
        """Forget segments that the owner gave back. The memory goes with the last view."""
        with self._lock:
            dropped = [self._mappings.pop(n) for n in segments if n in self._mappings]
        self._unmapping(dropped)

    def view(self, at: Descriptor) -> memoryview:
        """Return a read-only view of exactly the bytes that a descriptor names. Raise
        ProtocolViolation for an unknown segment, or bytes outside the segment."""
        mapping = self._mappings.get(at.segment)
        if mapping is None:
            raise ProtocolViolation(f"descriptor names unknown segment {at.segment}")
        end = at.offset + at.nbytes
        if at.offset < 0 or at.nbytes < 0 or end > mapping.size:
            raise ProtocolViolation(f"descriptor {at} reaches outside of its segment")
        return mapping.view[at.offset : end]

    def mapping(self, at: Descriptor) -> Mapping:
        """Return the segment of a descriptor, checked as by `view`."""
        self.view(at)
        return self._mappings[at.segment]

    def clear(self) -> None:
        with self._lock:
            dropped = list(self._mappings.values())
            self._mappings.clear()
        self._unmapping(dropped)

    def _unmapping(self, mappings: Iterable[Mapping]) -> None:
        for mapping in mappings:
            if self._book is not None:
                self._book.unmapping(mapping.address)
