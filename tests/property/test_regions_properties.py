"""The book of regions against a small model, under any order of operations."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmserve.config import Settings
from shmserve.core import regions as rules
from shmserve.core.region_names import object_name
from shmserve.core.regions import Caller, ObjectFacts, RegionBook
from shmserve.errors import InvalidArgument, NotFound, PermissionDenied, ShmserveError

LIMITS = Settings(client_shm_max_regions=3, client_shm_max_total_bytes=300)
CALLERS = st.sampled_from([Caller(0), Caller(1), Caller(11), Caller(1, 7, 70), Caller()])
NAMES = st.sampled_from(["a", "b", "1", "1a", "c", ""])
EDGES = [0, 1, 99, 100, 101, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64]
SIZES = st.sampled_from([-1, *EDGES]) | st.integers(0, 100)
SERVER = 5


class BookMachine(RuleBasedStateMachine):
    """`model`: (uid, name) to (offset, size); every object has 100 bytes."""

    def __init__(self):
        super().__init__()
        self.book = RegionBook(LIMITS, SERVER)
        self.model = {}
        self.numbers = set()

    def total(self, uid):
        own = [size for (owner, _), (_, size) in self.model.items() if owner == uid]
        return len(own), sum(own)

    @rule(caller=CALLERS, name=NAMES, offset=SIZES, size=SIZES, uid=st.sampled_from([0, 1, 11]))
    def register(self, caller, name, offset, size, uid):
        count, total = self.total(caller.uid)
        allowed = (
            not caller.remote
            and bool(name)
            and (caller.uid == 0 or uid == caller.uid)
            and (offset >= 0 and size > 0 and offset + size <= 100)
            and (caller.uid, name) not in self.model
            and (count < 3 and total + size <= 300)
        )
        facts = ObjectFacts(1, uid, 100, uid)
        try:
            region = self.book.register(caller, name, "/k", offset, size, facts)
        except ShmserveError:
            assert not allowed
            return
        assert allowed
        assert region.number not in self.numbers
        self.numbers.add(region.number)
        self.model[caller.uid, name] = (offset, size)
        assert self.book.register(caller, name, "/k", offset, size, facts, again=True) == region

    @rule(caller=CALLERS, name=NAMES)
    def unregister(self, caller, name):
        gone = self.book.unregister(caller, name)
        doomed = [k for k in self.model if k[0] == caller.uid and name in ("", k[1])]
        assert len(gone) == len(doomed)
        for key in doomed:
            del self.model[key]

    @rule()
    def reap(self):
        gone = self.book.drop([r.number for r in self.book.of_process(7, 70)])
        for region in gone:
            del self.model[region.uid, region.name]

    @rule()
    def restart(self):
        book = RegionBook(LIMITS, SERVER)
        book.restore(self.book.regions, self.book.next_number)
        self.book = book

    @rule(caller=CALLERS, name=NAMES, offset=SIZES, size=SIZES)
    def find(self, caller, name, offset, size):
        known = self.model.get((caller.uid, name))
        try:
            region = rules.find(self.book.regions, caller, name, offset, size, LIMITS, SERVER)
        except NotFound:
            assert known is None
            return
        except InvalidArgument:
            assert known is not None
            assert not (0 <= offset < known[1] and 0 <= size <= known[1] - offset)
            return
        assert (region.offset, region.byte_size) == known
        assert region.offset + offset + size <= region.end <= 100

    @invariant()
    def everybody_sees_just_their_own(self):
        for uid in (0, 1, 11):
            seen = rules.visible(self.book.regions, Caller(uid), LIMITS, SERVER)
            assert {(uid, r.name) for r in seen} == {k for k in self.model if k[0] == uid}
        assert rules.visible(self.book.regions, Caller(), LIMITS, SERVER) == []
        assert all(self.book.get(r.number) is r for r in self.book.regions.values())


TestBook = BookMachine.TestCase


@given(st.text(max_size=300))
def test_a_key_is_one_plain_file_name(key):
    try:
        name = object_name(key, "r")
    except InvalidArgument:
        return
    assert name
    assert not {"/", "\0"} & set(name)
    assert name not in (".", "..")
    assert key.lstrip("/") == name
    assert len(name.encode()) <= 255


def test_what_settings_widen():
    facts = ObjectFacts(1, 1, 100, uid=9)

    def register(caller, **settings):
        book = RegionBook(Settings(**settings), SERVER)
        return book.register(caller, "r", "k", 0, 10, facts)

    def refused(caller, **settings):
        try:
            register(caller, **settings)
        except PermissionDenied:
            return True
        return False

    assert refused(Caller(1))
    assert not refused(Caller(1), client_shm_allowed_uids=(1,))
    assert refused(Caller(2), client_shm_allowed_uids=(1,))
    assert refused(Caller())
    assert refused(Caller(), client_shm_allow_remote=True)  # the server does not own it either
    assert not refused(Caller(), client_shm_allow_remote=True, client_shm_allowed_uids=(SERVER,))
    ours = ObjectFacts(1, 1, 100, uid=0, ours=True)
    book = RegionBook(Settings(), 0)
    try:
        book.register(Caller(0), "r", "k", 0, 10, ours)
    except PermissionDenied:
        pass
    else:
        raise AssertionError("the server's own file was registered")
    assert book.regions == {}
