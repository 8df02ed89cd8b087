"""Let a process have no free descriptor, for as long as a test wants."""

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """Nothing more than `but` descriptors can be opened here, accepted or received."""
    gc.collect()  # else descriptors left by earlier tests may be closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.dup(0) for _ in range(but + 1)]
    for fd in lowest:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
