"""Giving back the heap of the gRPC process."""

import threading
from math import inf

import pytest

from shmserve.frontends.grpc.process import malloc_trim


@pytest.mark.parametrize("every_s", [1e10, inf])
def test_it_may_be_kept_for_good(every_s):
    stop = threading.Event()
    thread = threading.Timer(0.1, stop.set)
    thread.start()
    malloc_trim.trim_until(stop, every_s)
    thread.join()
    assert stop.is_set()
