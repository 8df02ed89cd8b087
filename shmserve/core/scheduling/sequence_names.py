"""Sequence names: which sequence a request means, and by which id the model knows the sequence.
Pure.

A sequence belongs to an owner, and only the owner's requests find the sequence. The owner is the
holder of a request's key, else the user on this host, else all remote callers together
(`sequence_owner`). If a model calls another model with the sequence id of a request, the sequence
belongs to the request's owner. With any other id, the sequence belongs to the calling model.

Two owners may use the same id at the same time. A model may keep states of its own by id, so the
model gets another id for the later of the two sequences.

Invariants (tests/property/test_sequence_names_properties.py):
- a name leads to the sequence begun under the same name, or to no sequence;
- the model's ids of living sequences differ, also when written as text;
- the model gets the request's own id, unless the id is in use under another name.
"""

from collections.abc import Mapping

from msgspec import Struct

from shmserve.core.caller import UNKNOWN_CALLER, Caller, caller_number

SequenceId = int | str  # 5 and "5" are two sequences

_MAX_NUMBER = (1 << 31) - 1  # fits every type of control input


class SequenceName(Struct, frozen=True, array_like=True, gc=False):
    """Name of a sequence, as requests give it. `owner`: caller number of the owner;
    `UNKNOWN_CALLER`: all remote callers without a key, or all callers (`shared_sequences`). `id`:
    id in the request's parameters, neither 0 nor empty."""

    owner: int
    id: SequenceId


def named_sequence(parameters: Mapping[str, object], owner: int) -> SequenceName | None:
    """Return the sequence named by a request's parameters, or None."""
    id = parameters.get("sequence_id")
    return SequenceName(owner, id) if id and isinstance(id, int | str) else None


def sequence_owner(caller: Caller, shared: bool) -> int:
    """Return the owner of the sequences named by a caller. `shared`: setting `shared_sequences`."""
    if shared:
        return UNKNOWN_CALLER
    if caller.key:
        return caller_number("key", caller.key)
    return UNKNOWN_CALLER if caller.remote else caller_number("user", str(caller.uid))


class SequenceNames:
    """Names of the living sequences of one instance, and their ids for the model."""

    def __init__(self) -> None:
        self._ids: dict[SequenceName, SequenceId] = {}
        # by the model's id as text: a model may read 5 and "5" as one id
        self._names: dict[str, SequenceName | None] = {}
        self._last_number = 0

    def find(self, name: SequenceName | None) -> SequenceId | None:
        """Return the model's id of a living sequence, or None if no such sequence lives."""
        return None if name is None else self._ids.get(name)

    def name_of(self, id: SequenceId) -> SequenceName | None:
        """Return the name of a living sequence, by the model's id; None if the sequence was begun
        without a name."""
        return self._names[str(id)]

    def begin(self, name: SequenceName | None) -> SequenceId:
        """Return the model's id for a new sequence. None: the request names no sequence."""
        id = self._unused_number() if name is None else name.id
        if str(id) in self._names:
            number = self._unused_number()
            id = str(number) if isinstance(id, str) else number
        if name is not None:
            self._ids[name] = id
        self._names[str(id)] = name
        return id

    def end(self, id: SequenceId) -> None:
        """Forget a sequence that has ended."""
        name = self._names.pop(str(id))
        if name is not None:
            del self._ids[name]

    def _unused_number(self) -> int:
        """Return a number that no living sequence has. Numbers count down, because clients count
        up."""
        while True:
            self._last_number = (self._last_number or _MAX_NUMBER + 1) - 1 or _MAX_NUMBER
            if str(self._last_number) not in self._names:
                return self._last_number
