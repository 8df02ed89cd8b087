"""Corridor: the way of one request through the server's code:
``python -m bench.corridor [--functions] [--json]``.

The request is warm: 64 KiB FP32 to the native model `identity`, over real sockets and real shared
memory. Frontend and executor run in one process under `sys.setprofile`. The request goes once as
binary HTTP inference, once as gRPC ModelInfer. Counting begins when the client sends, and ends when
every thread on the way waits for the next request, so memory given back after the answer counts.

    files      files of shmserve/ with an entered function
    moves      entered functions whose file differs from the file of the function entered before in
               the same thread; the start of a thread counts as a move. Returns do not count, nor
               does the order of threads, so the number is the same every time
    calls      entered functions of shmserve/, with lambdas and each step of a generator function.
               Comprehensions and generator expressions do not count (`comprehensions`): Python 3.12
               has no frames for most of them
    library    entered Python functions of other packages, in the same threads

Only threads on the request's way are counted: the connection's thread, or gRPC's thread that
submits the call and the pool's thread that runs the call; the executor's loop. Work that these
threads do once a second falls into some requests, and on a slow machine a receiver looks twice:
such requests count more. Waits sleep at once (`look_us` 0): looks depend on the machine. The report
has the smallest count that was seen `SAME` times, in at least `MIN_RUNS` requests. Smaller counts
are rare as well, because threads that meet share their work.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import shmserve
from bench.corridor_routes import LIMIT_S, ROUTES
from shmserve.transport import looking

PACKAGE = f"{Path(shmserve.__file__).resolve().parent}/"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
COUNTED = ("files", "moves", "calls")

WARM_RUNS = 10
MIN_RUNS = 20
MAX_RUNS = 500
SAME = 8
CALM_S = 0.003
CALM_LOOKS = 4


class Recorder:
    """Recorder of the functions entered, in order, in the threads that have called `install`."""

    def __init__(self):
        self.entered = []  # (thread, code)

    def install(self):
        sys.setprofile(self._event)

    def _event(self, frame, event, _):
        if event == "call":
            self.entered.append((threading.get_ident(), frame.f_code))

    def wait_calm(self):
        """Wait until several consecutive looks find no function entered and no thread of this
        process running."""
        give_up = time.monotonic() + LIMIT_S
        seen, calm = -1, 0
        while calm < CALM_LOOKS:
            if time.monotonic() > give_up:
                raise TimeoutError("the process does not come to rest")
            time.sleep(CALM_S)
            before, seen = seen, len(self.entered)
            calm = calm + 1 if seen == before and not others_run() else 0


def others_run():
    """Return whether a thread other than the caller runs or could run."""
    own = threading.get_native_id()
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != own:
            try:
                stat = (thread / "stat").read_text()
            except OSError:  # the thread has ended
                continue
            if stat.rpartition(")")[2].split()[0] != "S":
                return True
    return False


def counts(entered):
    """Return the counts of one request, and the calls by file."""
    ours = [(thread, code) for thread, code in entered if code.co_filename.startswith(PACKAGE)]
    threads = {thread for thread, _ in ours}
    calls = [(thread, code) for thread, code in ours if code.co_name not in COMPREHENSIONS]
    rooms, last, moves = {}, {}, 0
    for thread, code in calls:
        file = code.co_filename.removeprefix(PACKAGE)
        moves += last.get(thread) != file
        last[thread] = file
        rooms.setdefault(file, Counter())[code.co_qualname] += 1
    return {
        "files": len(rooms),
        "moves": moves,
        "calls": len(calls),
        "comprehensions": len(ours) - len(calls),
        "library": sum(thread in threads for thread, _ in entered) - len(ours),
        "threads": len(threads),
        "rooms": [
            {"file": file, "calls": sum(functions.values()), "functions": functions}
            for file, functions in rooms.items()
        ],
    }


def measure(route):
    """Return the smallest counts that occur repeatedly for a warm request on this route.

    Raises:
        RuntimeError: no two requests are alike.
    """
    recorder = Recorder()
    with ROUTES[route](recorder.install) as ask:
        for _ in range(WARM_RUNS):
            ask()
            recorder.wait_calm()
        seen, kept = Counter(), {}
        for run in range(1, MAX_RUNS + 1):
            recorder.entered.clear()
            ask()
            recorder.wait_calm()
            counted = counts(recorder.entered)
            key = _key(counted)
            seen[key] += 1
            kept.setdefault(key, counted)
            if run > MIN_RUNS and seen[min(seen)] >= SAME:
                break
    often = [key for key, times in seen.items() if times >= SAME]
    if not often:
        raise RuntimeError(
            f"{route}: calls, moves and files differ from request to request: {seen}"
        )
    return {**kept[min(often)], "seen": seen[min(often)], "runs": run}


def _key(counted):
    return tuple(counted[name] for name in reversed(COUNTED))


def report(measured, functions):
    names = [name for name in measured["http"] if name != "rooms"]
    print(f"{'':6}", *(f"{name:>{max(len(name), 6)}}" for name in names))
    for route, counted in measured.items():
        print(f"{route:6}", *(f"{counted[name]:>{max(len(name), 6)}}" for name in names))
    for route, counted in measured.items():
        print(f"\n{route}: rooms in the order of first entry, and the calls in each")
        for room in counted["rooms"]:
            print(f"{room['calls']:6}  {room['file']}")
            for name, calls in room["functions"].items() if functions else ():
                print(f"{'':14}{calls:3}  {name}")


def main():
    parser = argparse.ArgumentParser(prog="bench.corridor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--functions", action="store_true", help="name the functions of each file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("SHMSERVE_")]:
        del os.environ[name]
    looking.permit(0)
    measured = {route: measure(route) for route in ROUTES}
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "routes": measured}, indent=1))
    else:
        report(measured, arguments.functions)


if __name__ == "__main__":
    main()
