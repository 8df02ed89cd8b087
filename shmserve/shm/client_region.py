"""Client memory as an executor sees it: mapped once, or copied from and to.

The client can shrink its object at any moment; touching a page that is no more is a SIGBUS
that nothing can catch. So only executors touch mappings, the size is looked at before each
use, and `read` and `write` are there for those who cannot risk the rest: the kernel copies
for them and tells what is missing.

After the death of an executor the coordinator looks at the object of every region. A region whose
object is too small is quarantined, and the log names its owner. The request that used it gets 400
and is never run again; other requests run again if their model allows (`rerun`), or get 502.
From then on all regions of that owner are served by copying (`Region.copy`). The model was not to
blame and is started again without a pause.

`client_shm_mode = "copy"`, for the server or for one model (a parameter of config.pbtxt), uses
`preadv` and `pwritev` from the start. That costs two copies, and truncation is an ordinary error.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import RegionRef


class ClientRegion:
    """One region in this process. Views keep the mapping alive, nothing else must."""

    def __init__(self, region: Region, fd: int, copy: bool) -> None:
        """Take over `fd`; it is closed in any case.

        Raises:
            InvalidArgument: the object has become smaller than the region.
        """
        self.region = region
        self._may_shrink = not region.memory.keeps_size
        self.copy = copy
        self.address = self.size = 0  # of the mapping; none: where it is copied
        self._fd = fd
        self._view = memoryview(b"")
        try:
            self.check()
            if not copy:
                start = region.offset - region.offset % mmap.ALLOCATIONGRANULARITY
                mapping = mmap.mmap(
                    fd, region.end - start, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE,
                    offset=start,
                )  # fmt: skip
                self.address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
                self.size = region.end - start
                self._view = memoryview(mapping)[region.offset - start :]
        except (OSError, ValueError):
            self.close()
            raise InvalidArgument(
                f"shared memory region '{region.name}' cannot be mapped any more"
            ) from None
        except InvalidArgument:
            self.close()
            raise

    def check(self) -> None:
        """Refuse to touch it if its object is smaller than it was registered.

        Raises:
            InvalidArgument: for the request at hand; the region is of no use any more.
        """
        # A seek costs less than fstat; the position is used by nobody: we read and write at offsets
        if self._may_shrink and os.lseek(self._fd, 0, os.SEEK_END) < self.region.end:
            raise Shrunk(self.region)

    def view(self, at: RegionRef) -> memoryview:
        """The writable bytes of a window. Bounds are those that were registered.

        Raises:
            InvalidArgument: it reaches outside of the region.
        """
        self._check_bounds(at)
        return self._view[at.offset : at.offset + at.nbytes]

    def address_of(self, at: RegionRef) -> int:
        """Where the bytes that `view` gives lie in this process."""
        return self.address + self.region.offset % mmap.ALLOCATIONGRANULARITY + at.offset

    def read(self, at: RegionRef) -> memoryview:
        """A private copy of a window.

        Raises:
            InvalidArgument: outside of the region, or the object has been cut off.
        """
        self._check_bounds(at)
        target = np.empty(at.nbytes, np.uint8).data  # unlike a bytearray not zeroed first
        self.read_into(at, target)
        return target

    def read_into(self, at: RegionRef, target: memoryview) -> None:
        """Copy a window to `target`, which is as long; raises as `read`."""
        self._check_bounds(at)
        position = self.region.offset + at.offset
        done = 0
        while done < at.nbytes:
            count = os.preadv(self._fd, [target[done:]], position + done)
            if count <= 0:
                raise Shrunk(self.region)
            done += count

    def write(self, at: RegionRef, data: memoryview) -> None:
        """Copy `data` to the start of a window; raises as `read`, writes nothing outside."""
        self._check_bounds(at)
        assert len(data) <= at.nbytes
        self.check()
        position = self.region.offset + at.offset
        done = 0
        try:
            while done < len(data):
                done += os.pwritev(self._fd, [data[done:]], position + done)
        except OSError as ex:  # tmpfs full: the client's object was never filled
            raise InvalidArgument(
                f"shared memory region '{self.region.name}' cannot be written: {ex.strerror}"
            ) from None

    def _check_bounds(self, at: RegionRef) -> None:
        if at.offset < 0 or at.nbytes < 0 or at.offset + at.nbytes > self.region.byte_size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.region.name}'"
            )

    def close(self) -> None:
        """Forget it; the mapping goes with its last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._view = memoryview(b"")

    def __del__(self) -> None:
        self.close()


class Shrunk(InvalidArgument):
    """A client has taken memory away from under its own region."""

    def __init__(self, region: Region) -> None:
        super().__init__(
            f"shared memory region '{region.name}' is larger than its object, which has been"
            " truncated since it was registered"
        )
        self.number = region.number
