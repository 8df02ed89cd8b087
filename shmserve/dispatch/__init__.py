"""The one way in for every frontend: reserve, send, await, release."""

from shmserve.dispatch.call import Call
from shmserve.dispatch.dispatcher import Dispatcher
from shmserve.dispatch.outcome import Outcome, OutputTensor, RunOptions
from shmserve.dispatch.receipt import Receipt

__all__ = [
    "Call",
    "Dispatcher",
    "Outcome",
    "OutputTensor",
    "Receipt",
    "RunOptions",
]
