"""Base of all control-plane messages."""

from msgspec import Struct


class Message(Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base class: messages are tagged by class name and encoded as arrays."""
