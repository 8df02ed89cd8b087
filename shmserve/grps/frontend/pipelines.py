"""Pipelines as GRPS clients see them: models called by the pipeline's name."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.grps.frontend.metadata_documents import dump

_VERSIONS = ("1", "1.0.0")


def named(name: str, settings: Settings) -> str:
    """The pipeline that a client means by `name` or `name-1.0.0`; "": none."""
    bare, _, version = name.rpartition("-")
    known = settings.pipelines
    return name if name in known else bare if version in _VERSIONS and bare in known else ""


def document(name: str, settings: Settings) -> str:
    """The metadata of a pipeline: its steps, in the form in which GRPS has its own."""
    nodes = [
        {"name": f"node-{number}", "type": "model", "model": model}
        for number, model in enumerate(settings.pipelines[name], 1)
    ]
    return dump(
        {"name": name, "version": _VERSIONS[-1], "type": "sequential", "nodes": nodes}, sort=True
    )
