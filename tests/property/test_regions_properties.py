"""The book of regions against a small model, under any order of operations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.region_kinds import CUDA, SYSTEM
from shmserve.core.regions import region_book as rules
from shmserve.core.regions.region_book import ObjectFacts, RegionBook
from shmserve.core.regions.region_names import check_allocation, cuda_region, object_name
from shmserve.errors import InvalidArgument, NotFound, PermissionDenied, ShmserveError
from shmserve.protocol.control.region_messages import ProbeRegion, RegionGiven, RegisterCudaRegion

LIMITS = Settings(client_shm_max_regions=3, client_shm_max_total_bytes=300)
CALLERS = st.sampled_from([Caller(0), Caller(1), Caller(11), Caller(1, 7, 70), Caller()])
NAMES = st.sampled_from(["a", "b", "1", "1a", "c", ""])
EDGES = [0, 1, 99, 100, 101, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64]
SIZES = st.sampled_from([-1, *EDGES]) | st.integers(0, 100)
HANDLES = st.sampled_from([b"", b"h" * 63, b"h" * 64, b"i" * 64, b"h" * 65])
KINDS = st.sampled_from([SYSTEM, CUDA])
SERVER = 5
DEVICES = 2


class BookMachine(RuleBasedStateMachine):
    """`model`: (uid, name) to (kind, offset, size); every object has 100 bytes."""

    def __init__(self):
        super().__init__()
        self.book = RegionBook(LIMITS, SERVER)
        self.model = {}
        self.numbers = set()

    def total(self, uid):
        own = [size for (owner, _), (_, _, size) in self.model.items() if owner == uid]
        return len(own), sum(own)

    def entered(self, caller, name, kind, offset, region):
        assert (region.kind, region.offset) == (kind, offset)
        assert region.number not in self.numbers
        self.numbers.add(region.number)
        self.model[caller.uid, name] = (kind, offset, region.byte_size)

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
        self.entered(caller, name, SYSTEM, offset, region)
        assert self.book.register(caller, name, "/k", offset, size, facts, again=True) == region

    @rule(caller=CALLERS, name=NAMES, handle=HANDLES, device=st.integers(-1, 2), size=SIZES)
    def register_cuda(self, caller, name, handle, device, size):
        count, total = self.total(caller.uid)
        allowed = (
            not caller.remote
            and bool(name)
            and len(handle) == 64
            and 0 <= device < DEVICES
            and 0 < size < 1 << 63
            and (caller.uid, name) not in self.model
            and (count < 3 and total + size <= 300)
        )
        try:
            self.book.may_register(caller)
            made = cuda_region(caller, name, handle, device, size, DEVICES)
            assert self.book.admit(made) is made  # which changes nothing
            region = self.book.enter(made)
        except ShmserveError:
            assert not allowed
            return
        assert allowed
        self.entered(caller, name, CUDA, 0, region)
        assert (region.handle, region.device_id) == (handle, device)
        assert self.book.enter(made, again=True) == self.book.admit(made, again=True) == region

    @rule(caller=CALLERS, name=NAMES, kind=KINDS)
    def unregister(self, caller, name, kind):
        gone = self.book.unregister(caller, name, kind)
        doomed = [
            key
            for key, (its, _, _) in self.model.items()
            if key[0] == caller.uid and name in ("", key[1]) and its == kind
        ]
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
            assert not (0 <= offset < known[2] and 0 <= size <= known[2] - offset)
            return
        assert (region.kind, region.offset, region.byte_size) == known
        assert region.offset + offset + size <= region.end
        assert not region.memory.has_descriptor or region.end <= 100

    @invariant()
    def everybody_sees_just_their_own(self):
        for uid in (0, 1, 11):
            seen = rules.visible(self.book.regions, Caller(uid), LIMITS, SERVER)
            assert {(uid, r.name) for r in seen} == {k for k in self.model if k[0] == uid}
            for kind in (SYSTEM, CUDA):
                some = rules.visible(self.book.regions, Caller(uid), LIMITS, SERVER, kind)
                assert some == [region for region in seen if region.kind == kind]
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


@given(size=st.integers(1, 1 << 62), allocation=st.integers(0, 1 << 64))
def test_a_cuda_region_lies_within_its_allocation(size, allocation):
    region = cuda_region(Caller(1), "r", b"h" * 64, 0, size, 1)
    if size <= allocation:
        check_allocation(region, allocation)
        return
    told = f"byte_size {size}, but the allocation has {allocation} bytes"
    with pytest.raises(InvalidArgument, match=told):
        check_allocation(region, allocation)


def test_what_is_wrong_with_gpu_memory_is_told():
    def told(handle, device_id, byte_size, devices):
        with pytest.raises(InvalidArgument) as caught:
            cuda_region(Caller(1), "r", handle, device_id, byte_size, devices)
        assert "hhh" not in caught.value.message
        return caught.value.message

    failed = "failed to register shared memory region 'r'"
    assert told(b"h" * 64, 0, 1, 0) == (
        "failed to register CUDA shared memory region: 'r', GPUs not supported"
    )
    assert told(b"h" * 63, 0, 1, 1) == (
        f"{failed}: invalid args: raw_handle has 63 bytes, a cudaIpcMemHandle_t has 64"
    )
    number = f"{failed}: invalid args: device_id 4, but the number of devices is 4"
    assert told(b"h" * 64, 4, 1, 4) == number
    assert told(b"h" * 64, -1, 1, 4) == f"{failed}: invalid args: device_id -1 is negative"
    assert told(b"h" * 64, 0, 0, 4) == f"{failed}: invalid args: byte_size 0"


def test_a_handle_is_never_shown():
    region = cuda_region(Caller(1), "r", b"hush" * 16, 0, 1, 1)
    message = RegisterCudaRegion(1, "r", b"hush" * 16, 0, 1, 1, 0, 0)
    for shown in (region, RegionGiven(1, region), ProbeRegion(1, region), message):
        assert "hush" not in repr(shown)


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
    # the server does not own the object either
    assert refused(Caller(), client_shm_allow_remote=True)
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
