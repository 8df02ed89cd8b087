"""Obeys every command, however harmful."""

import ctypes
import os
import sys
import time

import numpy as np


class Model:
    def __init__(self, context):
        self.kept = []

    def infer(self, request):
        command, _, argument = request.input("COMMAND")[0].decode().partition(":")
        return getattr(self, command)(request, argument)

    def ok(self, request, argument):
        return {"OUT": np.full(int(argument or 1), os.getpid(), np.float32)}

    def loop(self, request, argument):
        while True:
            time.sleep(0.01)

    def sleep(self, request, argument):
        time.sleep(float(argument))
        return {"OUT": np.zeros(1, np.float32)}

    def hold(self, request, argument):
        """See `tests.holding`."""
        open(f"{argument}.begun", "w").close()
        while os.path.exists(argument):
            time.sleep(0.01)
        return self.ok(request, "")

    def seize(self, request, argument):
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock

    def throw(self, request, argument):
        raise ValueError("no such luck in /srv/secret/model.py")

    def leave(self, request, argument):
        os._exit(int(argument or 1))

    def fork_and_leave(self, request, argument):
        """Fork a child that inherits all open resources, and write the child's pid to a file."""
        child = os.fork()
        if not child:
            time.sleep(1000)
        with open(argument, "w") as file:
            file.write(str(child))
        os._exit(3)

    def exit(self, request, argument):
        sys.exit(3)

    def wrong_name(self, request, argument):
        return {"NOPE": np.zeros(1, np.float32)}

    def wrong_type(self, request, argument):
        return {"OUT": np.zeros(1, np.float64)}

    def wrong_rank(self, request, argument):
        return {"OUT": np.zeros((1, 1), np.float32)}

    def nothing(self, request, argument):
        return None

    def nonsense(self, request, argument):
        return 42

    def greedy(self, request, argument):
        return {"OUT": np.ones(1 << 45, np.float32)}

    def big_output(self, request, argument):
        return {"OUT": request.output("OUT", (int(argument),))}

    def keep(self, request, argument):
        self.kept.append(request.output("OUT", (1000,)))
        self.kept[-1][:] = 1
        return {"OUT": self.kept[-1]}
