"""Identifiers: epochs, process ids, instance names.

Randomness enters through arguments so that the pure layers stay deterministic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")


def new_epoch(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """A fresh epoch: 8 hexadecimal digits naming one life of the service's state."""
    return random_bytes(4).hex()


def new_process_id(role: str, pid: int, random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """A name for one life of one process, e.g. ``http-4711-9f3a``; pids alone are reused."""
    return f"{role}-{pid}-{random_bytes(2).hex()}"


def instance_name(model: str, version: str, index: int) -> str:
    """The stable name of a model instance, e.g. ``digits/1/0``."""
    return f"{model}/{version}/{index}"


def reborn(instance: str, revision: int) -> str:
    """An instance's name in a later revision of its model, e.g. ``digits/1/0@7``."""
    return f"{instance}@{revision}" if revision > 1 else instance


def instance_index(instance: str) -> int:
    """Which of its version's instances one is, in any revision."""
    return int(instance.rpartition("/")[2].partition("@")[0])


def instance_model(instance: str) -> tuple[str, str]:
    """The model and the version that it is an instance of."""
    model, version, _ = instance.rsplit("/", 2)
    return model, version


def is_model_name(name: str) -> bool:
    """Whether a name can be a folder of a model repository and nothing else."""
    return _MODEL_NAME.fullmatch(name) is not None and ".." not in name
