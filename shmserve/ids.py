"""Identifiers: epochs, process ids, instance names.

Randomness enters through arguments so that the pure layers stay deterministic.
"""

import os
import re
from collections.abc import Callable

_LONGEST_NAME = 255  # of a model, whose folder has the same name
_NO_MODEL_CHARACTER = re.compile(r"[^A-Za-z0-9_.+-]")
_NO_BEGINNING = (".", "+", "-")


def new_epoch(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Return a fresh epoch: 8 hexadecimal digits that name one life of the service's state."""
    return random_bytes(4).hex()


def new_process_id(role: str, pid: int, random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Return a name for one life of a process, e.g. ``http-4711-9f3a``; pids alone are reused."""
    return f"{role}-{pid}-{random_bytes(2).hex()}"


def instance_name(model: str, version: str, index: int) -> str:
    """Return the stable name of a model instance, e.g. ``digits/1/0``."""
    return f"{model}/{version}/{index}"


def reborn(instance: str, revision: int) -> str:
    """Return an instance's name in a later revision of its model, e.g. ``digits/1/0@7``."""
    return f"{instance}@{revision}" if revision > 1 else instance


def instance_index(instance: str) -> int:
    """Return the index of an instance within its version, in any revision."""
    return int(instance.rpartition("/")[2].partition("@")[0])


def instance_model(instance: str) -> tuple[str, str]:
    """Return the model and the version of an instance."""
    model, version, _ = instance.rsplit("/", 2)
    return model, version


def is_model_name(name: str) -> bool:
    """Return whether a text can name a model: 1 to 255 letters, digits and ``_ . + -`` of ASCII,
    the first of them a letter, a digit or ``_``. Such a name is also a safe folder name: it
    leads nowhere else."""
    return bool(name) and not model_name_fault(name)


def model_name_fault(name: str) -> str:
    """Return why a name that is not empty cannot be a model's; empty if it can."""
    found = _NO_MODEL_CHARACTER.search(name)
    if name in (".", "..") or "/" in name or "\\" in name:
        part = "/" if "/" in name else "\\" if "\\" in name else name
        return f"model name must not contain path traversal characters: it has '{part}'"
    if found is not None:
        return f"it has {found[0]!a}, and names have letters, digits and _ . + - only"
    if name.startswith(_NO_BEGINNING):
        return f"it begins with '{name[0]}', and names begin with a letter, a digit or _"
    if len(name) > _LONGEST_NAME:
        return f"it has {len(name)} characters, and names have at most {_LONGEST_NAME}"
    return ""
