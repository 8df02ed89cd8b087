"""Fetcher without a service, for tests: runs a round per line of JSON, answers with a line."""

import json
import logging
import os
import sys
import threading
from functools import cache
from typing import Any

from shmserve import config, model_places
from shmserve.config import Settings
from shmserve.fetcher import stores
from shmserve.fetcher.cache import Cache
from shmserve.fetcher.rounds import Rounds

logging.basicConfig(level=logging.DEBUG)
stores.quiet()


@cache
def rounds_of(environ: str) -> Rounds:
    """Return the `Rounds` of a service with these settings."""
    settings: Settings = config.load(json.loads(environ))
    owner = f"fetcher-{os.getpid()}-{rounds_of.cache_info().misses}"
    folder = Cache(model_places.cache_dir(settings), settings.repository_cache_bytes, owner)
    return Rounds(settings, folder, lambda url: stores.Store(url, settings))


def answer(question: dict[str, Any], rounds: Rounds) -> None:
    done = rounds.run(question["names"], question["keep"])
    print(json.dumps({"problems": done.problems, "unlisted": done.unlisted}), flush=True)


for line in sys.stdin:
    question = json.loads(line)
    rounds = rounds_of(json.dumps(question["environ"]))
    threading.Thread(target=answer, args=(question, rounds)).start()
os._exit(0)
