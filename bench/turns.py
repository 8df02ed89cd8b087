"""Contestants that take turns, and clients in closed loops."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor


def seconds(call):
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turn(rounds, contestants, warm_up=2):
    """Return what the calls returned, by name, after `warm_up` uncounted calls of each contestant;
    every second round goes backwards."""
    for call in contestants.values():
        for _ in range(warm_up):
            call()
    told = {name: [] for name in contestants}
    for number in range(rounds):
        for name, call in list(contestants.items())[:: 1 if number % 2 else -1]:
            told[name].append(call())
    return told


def spread(values):
    """Return the median, the lowest and the highest tenth."""
    low, *_, high = statistics.quantiles(values, n=10)
    return statistics.median(values), low, high


def closed_loops(calls, lasting):
    """Make each call again and again, for `lasting` seconds, each in a thread. Return the seconds
    of all calls."""
    until = time.perf_counter() + lasting

    def loop(call):
        taken = []
        while time.perf_counter() < until:
            taken.append(seconds(call))
        return taken

    with ThreadPoolExecutor(len(calls)) as pool:
        return [taken for own in pool.map(loop, calls) for taken in own]
