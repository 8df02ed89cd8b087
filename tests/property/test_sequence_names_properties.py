"""Names of sequences: each owner finds its own sequences only, and the model mixes up none."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmserve.core.scheduling.sequence_names import SequenceId, SequenceName, SequenceNames

_TOP = (1 << 31) - 1
_IDS = st.sampled_from([1, "1", 2, "two", _TOP, str(_TOP), _TOP - 1, _TOP - 2])
_NAMES = st.builds(SequenceName, st.integers(0, 2), _IDS)


class NamesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = SequenceNames()
        self.living: dict[SequenceId, SequenceName | None] = {}  # by the model's id

    @rule(name=st.one_of(st.none(), _NAMES))
    def begin(self, name: SequenceName | None) -> None:
        if name is not None and self.names.find(name) is not None:
            return
        texts = {str(id) for id in self.living}
        id = self.names.begin(name)
        assert str(id) not in texts
        if name is None:
            assert isinstance(id, int)
        elif str(name.id) not in texts:
            assert id == name.id
        else:  # the model gets an id of the same type, which fits every control input
            assert type(id) is type(name.id)
            assert 0 < int(id) <= _TOP
        self.living[id] = name

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.living:
            id = data.draw(st.sampled_from(sorted(self.living, key=repr)))
            del self.living[id]
            self.names.end(id)

    @rule(name=_NAMES)
    def find(self, name: SequenceName) -> None:
        found = self.names.find(name)
        assert found == next((id for id, other in self.living.items() if other == name), None)
        assert found is None or self.names.name_of(found) == name

    @invariant()
    def nothing_is_kept_of_ended_sequences(self) -> None:
        named = [name for name in self.living.values() if name is not None]
        assert len(self.names._ids) == len(named)
        assert set(self.names._names) == {str(id) for id in self.living}


TestSequenceNames = NamesMachine.TestCase


def test_an_owners_own_id_is_not_the_one_that_the_model_got_for_another() -> None:
    names = SequenceNames()
    names.begin(SequenceName(1, 5))
    other = names.begin(SequenceName(2, 5))
    assert other == _TOP
    assert names.begin(SequenceName(2, _TOP)) not in (5, _TOP)
