"""What all messages of the control plane have in common."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base: tagged by class name, encoded as an array."""
