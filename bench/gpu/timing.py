"""Forms of times in the output. Without a real GPU there are no times."""

import os
import statistics

import cupy

FAKE = cupy.__version__ == "0-fake" or "FAKE_CUDA_STANDIN" in os.environ  # tests/cuda/standin.py
NO_TIMING = "fake: no timing"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def summary(seconds):
    """Return median and tenths, in milliseconds."""
    if FAKE:
        return NO_TIMING
    low, *_, high = statistics.quantiles(seconds, n=10)
    quantiles = {"p50": statistics.median(seconds), "p10": low, "p90": high}
    return {name: milliseconds(value) for name, value in quantiles.items()}


def milliseconds(seconds):
    return NO_TIMING if FAKE else round(seconds * 1e3, 4)


def ratio(numerator, denominator):
    """Return the ratio of two medians."""
    if FAKE:
        return NO_TIMING
    return round(statistics.median(numerator) / statistics.median(denominator), 3)


def rate(nbytes, seconds):
    """Return the rate in GB/s."""
    return NO_TIMING if FAKE else round(nbytes / statistics.median(seconds) / 1e9, 2)


def size_name(nbytes):
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
