"""A model process behind multiprocessing queues: each tensor is pickled into a pipe and out of one,
in both directions."""

import itertools
import multiprocessing
import os
import queue
import signal
import threading
from concurrent.futures import Future


def model(requests, answers, parent):
    """The model process: gives every tensor back, or its first element for `noop`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    while os.getppid() == parent:
        try:
            number, name, tensor = requests.get(timeout=2)
        except queue.Empty:
            continue
        answers.put((number, tensor[:1] if name == "noop" else tensor))


class Model:
    """The process, forked at once, and a thread that hands the answers to those who wait."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._requests, self._answers = context.Queue(), context.Queue()
        self._waiting = {}
        self._numbers = itertools.count()
        arguments = (self._requests, self._answers, os.getpid())
        context.Process(target=model, args=arguments, daemon=True).start()
        threading.Thread(target=self._distribute, daemon=True).start()

    def _distribute(self):
        while True:
            number, tensor = self._answers.get()
            self._waiting.pop(number).set_result(tensor)

    def ask(self, name, tensor):
        number, answer = next(self._numbers), Future()
        self._waiting[number] = answer
        self._requests.put((number, name, tensor))
        return answer.result(timeout=120)
