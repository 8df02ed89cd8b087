"""Plan of a load: levels of concurrency, the moments at which requests should start, and the
knee of the levels. Pure."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from shmserve.errors import ConfigError

_SEED = 1
_MOST_LEVELS = 32
_GROWTH = 1.1  # of the rate, while the concurrency doubles, below the knee


def levels(text: str, limit: int) -> list[int]:
    """Return the levels of `--concurrency` in ascending order: `4`, `1,2,8`, or `1:20` for 1, 2, 4,
    8, 16 and 20. Raise ConfigError for other texts and for levels outside 1 to `limit`."""
    try:
        numbers = [int(word) for word in text.replace(":", ",").split(",")]
    except ValueError:
        raise ConfigError(f"--concurrency: '{text}' is not N, N,N,... or LOW:HIGH") from None
    if not all(0 < number <= limit for number in numbers):
        raise ConfigError(f"--concurrency: must be more than 0 and at most {limit}")
    if ":" in text:
        if text.count(":") > 1 or "," in text or numbers[0] > numbers[1]:
            raise ConfigError(f"--concurrency: '{text}' is not LOW:HIGH")
        low, high = numbers
        numbers = [low << n for n in range(limit.bit_length()) if low << n < high] + [high]
    if len(numbers) > _MOST_LEVELS:
        raise ConfigError(f"--concurrency: more than {_MOST_LEVELS} levels")
    return sorted(set(numbers))


def arrivals(rate: float, poisson: bool, start_s: float) -> Iterator[float]:
    """Yield the moments, in seconds, at which requests should start. The first moment is
    `start_s`. Distances are equal, or random as in a Poisson process, and the same in every
    run."""
    if not poisson:
        yield from (start_s + number / rate for number in itertools.count())
    generator = random.Random(_SEED)
    due = start_s
    while True:
        yield due
        due += generator.expovariate(rate)


def knee(rates: Sequence[tuple[int, float]]) -> int | None:
    """Return the last level up to which the rate grows by at least 10 % per doubling of the
    concurrency; None: the rate grows so up to the highest level.

    Args:
        rates: concurrency and requests per second of each level, with ascending concurrency.
    """
    for (low, before), (high, rate) in itertools.pairwise(rates):
        if rate < before * _GROWTH ** math.log2(high / low):
            return low
    return None
