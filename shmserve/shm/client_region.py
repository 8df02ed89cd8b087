"""Client memory in an executor: mapped once, or copied from and to.

The client can shrink its object at any moment. Touching a page beyond the end then raises SIGBUS,
which the process cannot catch. So only executors touch mappings, and the size is checked before
each use. `read` and `write` avoid the remaining risk: the kernel copies and reports missing bytes.

After the death of an executor the coordinator checks the object of every region. A region whose
object is too small is quarantined, and the log names its owner. The request that used the region
gets 400 and is never run again. Other requests run again if their model allows (`rerun`), or get
502. From then on all regions of this owner are served by copying (`Region.copy`). The model was
not to blame and is started again without a pause.

`client_shm_mode = "copy"`, for the server or for one model (a parameter of config.pbtxt), uses
`preadv` and `pwritev` from the start. This mode costs two copies and turns truncation into an
ordinary error.
"""

import mmap
import os

import numpy as np

from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import RegionRef


class ClientRegion:
    """A region, mapped into this process or copied. The mapping lives as long as a view of it."""

    def __init__(self, region: Region, fd: int, copy: bool) -> None:
        """Take over `fd` and close it later, in case of an error at once. Raise InvalidArgument if
        the object has become smaller than the region."""
        self.region = region
        self._may_shrink = not region.memory.keeps_size
        self.copy = copy
        self.address = self.size = 0  # of the mapping; both 0 if the region is copied
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
        """Refuse a region whose object is smaller than at registration. The error is
        InvalidArgument, for the present request; the region is useless from now on."""
        # A seek costs less than fstat. No code uses the position: reads and writes name their
        # offset.
        if self._may_shrink and os.lseek(self._fd, 0, os.SEEK_END) < self.region.end:
            raise Shrunk(self.region)

    def view(self, at: RegionRef) -> memoryview:
        """Return the writable bytes of a window, within the registered bounds."""
        self._check_bounds(at)
        return self._view[at.offset : at.offset + at.nbytes]

    def address_of(self, at: RegionRef) -> int:
        """Return the address, in this process, of the bytes that `view` returns."""
        return self.address + self.region.offset % mmap.ALLOCATIONGRANULARITY + at.offset

    def read(self, at: RegionRef) -> memoryview:
        """Return a private copy of a window. Raise InvalidArgument if the window reaches outside
        the region, or the object was truncated."""
        self._check_bounds(at)
        target = np.empty(at.nbytes, np.uint8).data  # not zeroed first, unlike a bytearray
        self.read_into(at, target)
        return target

    def read_into(self, at: RegionRef, target: memoryview) -> None:
        """Copy a window to `target`, which has the window's size. Raises as `read`."""
        self._check_bounds(at)
        position = self.region.offset + at.offset
        done = 0
        while done < at.nbytes:
            count = os.preadv(self._fd, [target[done:]], position + done)
            if count <= 0:
                raise Shrunk(self.region)
            done += count

    def write(self, at: RegionRef, data: memoryview) -> None:
        """Copy `data` to the start of a window and write nothing outside. Raises as `read`."""
        self._check_bounds(at)
        assert len(data) <= at.nbytes
        self.check()
        position = self.region.offset + at.offset
        done = 0
        try:
            while done < len(data):
                done += os.pwritev(self._fd, [data[done:]], position + done)
        # tmpfs is full, and the client has never written this part of the object
        except OSError as ex:
            raise InvalidArgument(
                f"shared memory region '{self.region.name}' cannot be written: {ex.strerror}"
            ) from None

    def _check_bounds(self, at: RegionRef) -> None:
        if at.offset < 0 or at.nbytes < 0 or at.offset + at.nbytes > self.region.byte_size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.region.name}'"
            )

    def close(self) -> None:
        """Close the descriptor. The mapping goes with its last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._view = memoryview(b"")

    def __del__(self) -> None:
        self.close()


class Shrunk(InvalidArgument):
    """Error for a client that has truncated the object of its own region."""

    def __init__(self, region: Region) -> None:
        super().__init__(
            f"shared memory region '{region.name}' is larger than its object, which has been"
            " truncated since it was registered"
        )
        self.number = region.number
