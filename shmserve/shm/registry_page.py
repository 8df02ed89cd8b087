"""The registry in shared memory: every process reads it, only the coordinator writes it.

Two files in the run directory:

    registry.msgpack   the `Snapshot`, replaced as a whole (rename)
    registry.page      4096 bytes, mapped by all processes
        offset 0   u64   magic and version of this layout
        offset 8   u64   generation of the newest snapshot; 0: no snapshot yet

A change writes the new file, renames it over the old file, then stores the generation word. So a
reader of generation g finds a file of generation >= g. Once `publish` has returned, every later
read in any process sees the change, at the price of one load.

INVARIANT: one writer, one aligned 8-byte word, stored through `memoryview.cast("Q")`
(`struct.pack_into` would zero the word first). The word is only compared for equality. The file is
trusted, because only processes of the server's user can write it.

`RegistryChanged` wakes a process that waits for a change (a request whose executor died on client
memory). A restarted coordinator continues the generation of the file.
"""

import mmap
import os
import threading
import time

import msgspec
from msgspec.structs import replace

from shmserve.core.registry import Snapshot
from shmserve.errors import Unavailable
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.replaced_file import ReplacedFile

PAGE_FILE = "registry.page"
SNAPSHOT_FILE = "registry.msgpack"
PAGE_BYTES = 4096
MAGIC = 0x73686D7372760001  # "shmsrv", layout 1
_MAGIC_WORD = 0
_GENERATION_WORD = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(Snapshot)


class RegistryWriter:
    """The writing end. Exists once, in the coordinator.

    `previous` is the last snapshot of an earlier coordinator of this epoch, or None. A page of
    another epoch is replaced by a fresh page: the old readers ended with their service. A page
    without a snapshot stays: the coordinator died early, and processes of this epoch may read the
    page.
    """

    def __init__(self, run_dir: str, epoch: str) -> None:
        self.epoch = epoch
        self._file = ReplacedFile(os.path.join(run_dir, SNAPSHOT_FILE))
        previous: Snapshot | None = self._file.read(_decode)
        self.previous = previous if previous and previous.epoch == epoch else None
        page = os.path.join(run_dir, PAGE_FILE)
        generation = _generation_of(page)
        if generation is None or (self.previous is None and generation > 0):
            self._make_page(page)
        with open(page, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._generation = self._words[_GENERATION_WORD]
        # the earlier coordinator may have died between file and word
        if self.previous is not None:
            self._generation = max(self._generation, self.previous.generation)

    def publish(self, snapshot: Snapshot) -> Snapshot | None:
        """Make `snapshot` the current snapshot. Return the snapshot with its generation.

        Return None if the file cannot be written: the former snapshot stays current.
        """
        numbered = replace(snapshot, epoch=self.epoch, generation=self._generation + 1)
        if not self._file.write(_encode(numbered)):
            return None
        self._generation = numbered.generation
        self._words[_GENERATION_WORD] = numbered.generation
        return numbered

    def keep_room(self) -> None:
        """Allocate room for the next snapshot, unless it is allocated already."""
        self._file.keep_room()

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _make_page(self, path: str) -> None:
        page = bytearray(PAGE_BYTES)
        with memoryview(page) as view, view.cast("Q") as words:
            words[_MAGIC_WORD] = MAGIC
        with open(path + ".new", "wb") as file:
            file.write(page)
        os.replace(path + ".new", path)


class RegistryReader:
    """The reading end. `current()` costs one load while nothing has changed."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._published = threading.Condition()
        self._words: memoryview | None = None
        self._cached: Snapshot | None = None

    def current(self) -> Snapshot:
        """Return the newest published snapshot. Any thread may call this method. Raise Unavailable
        if nothing has been published yet."""
        words, cached = self._words, self._cached
        if (
            cached is not None
            and words is not None
            and words[_GENERATION_WORD] == cached.generation
        ):
            return cached
        with self._lock:
            return self._refresh()

    def newer(self, snapshot: Snapshot, timeout_s: float) -> Snapshot | None:
        """Wait for a snapshot newer than `snapshot` and return it, or None after the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._published:
            while True:
                current = self.current()
                remaining_s = deadline - time.monotonic()
                if current.generation != snapshot.generation:
                    return current
                if remaining_s <= 0:
                    return None
                self._published.wait(remaining_s)

    def changed(self) -> None:
        """Wake the threads that wait in `newer`, because something was published."""
        with self._published:
            self._published.notify_all()

    def _refresh(self) -> Snapshot:
        try:
            if self._words is None:
                self._words = _open_page(self._run_dir)
            generation = self._words[_GENERATION_WORD]
            if self._cached is None or self._cached.generation < generation:
                if generation == 0:
                    raise Unavailable("the server is starting")
                self._cached = _read(self._run_dir)
        except OSError:
            raise Unavailable("the server is starting") from None
        return self._cached


def _read(run_dir: str) -> Snapshot:
    with open(os.path.join(run_dir, SNAPSHOT_FILE), "rb") as file:
        snapshot: Snapshot = _decode(file.read())
    return snapshot


def _generation_of(path: str) -> int | None:
    """Return the generation that a page names; None if the file is no page."""
    try:
        with open(path, "rb") as file:
            page = file.read()
    except OSError:
        return None
    words = memoryview(page).cast("Q") if len(page) == PAGE_BYTES else (0,)
    return words[_GENERATION_WORD] if words[_MAGIC_WORD] == MAGIC else None


def _open_page(run_dir: str) -> memoryview:
    """Map the page read-only. The mapping lives as long as the view."""
    with open(os.path.join(run_dir, PAGE_FILE), "rb") as file:
        mapping = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)
    words = memoryview(mapping).cast("Q")
    if words[_MAGIC_WORD] != MAGIC:
        raise OSError("not a registry page")
    return words
