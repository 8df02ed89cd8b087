"""Rate limiter: grants never exceed the resources, nobody starves, all resources come back."""

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.scheduling.rate_limit_policy import EVERYWHERE, RateLimit, Resource
from shmserve.core.scheduling.rate_limiter import Acquisition, RateLimiter, ResourceUse

GIVEN = {("a", EVERYWHERE): 3, ("b", "cpu"): 2}
NAMES = ["p", "q", "r", "s", "t"]

resources = st.tuples(
    st.builds(Resource, st.just("a"), st.integers(1, 3), st.sampled_from(["cpu", "cuda:0"])),
    st.builds(Resource, st.just("b"), st.integers(1, 2), st.just("cpu")),
    st.builds(Resource, st.just("c"), st.integers(1, 4), st.just(EVERYWHERE)),
).flatmap(lambda all_: st.lists(st.sampled_from(all_), min_size=1, unique=True).map(tuple))
limits = st.builds(RateLimit, resources, st.integers(1, 4))
steps = st.lists(
    st.tuples(st.sampled_from(["join", "acquire", "release", "leave"]), st.sampled_from(NAMES))
)


class World:
    """A limiter and the state of its processes: their tickets, and which hold resources."""

    def __init__(self, needs: dict[str, RateLimit]) -> None:
        self.limiter = RateLimiter(GIVEN)
        self.needs = needs
        self.asked: dict[str, int] = {}
        self.holding: set[str] = set()
        self.joined: set[str] = set()
        self.tickets = 0

    def do(self, what: str, name: str) -> None:
        turns: Iterable[Acquisition] = ()
        if what == "join" and name not in self.joined:
            self.joined.add(name)
            turns = self.limiter.join(name, self.needs[name])
        elif what == "leave":
            self.forget(name)
            self.joined.discard(name)
            turns = self.limiter.leave(name)
        elif what == "release" and name in self.joined:
            self.forget(name)
            turns = self.limiter.release(name)
        elif what == "acquire" and name in self.joined:
            self.forget(name)
            self.tickets += 1
            self.asked[name] = self.tickets
            turns = self.limiter.acquire(name, self.tickets)
        for turn in turns:
            assert self.asked.pop(turn.process) == turn.ticket
            self.holding.add(turn.process)
        if turns:
            self.check()

    def forget(self, name: str) -> None:
        self.asked.pop(name, None)
        self.holding.discard(name)

    def check(self) -> None:
        used = Counter[tuple[str, str]]()
        for name in self.holding:
            for resource in self.needs[name].resources:
                used[resource.key] += resource.count
        most_c = [r.count for n in self.joined for r in self.needs[n].resources if r.name == "c"]
        there = {("a", "cpu"): 3, ("a", "cuda:0"): 3, ("b", "cpu"): 2}
        # The amount of a resource without a configured amount shrinks once its neediest user,
        # which held it, has left
        there["c", EVERYWHERE] = max([*most_c, 4])
        assert all(used[key] <= there[key] for key in used)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, limits)), steps)
def test_no_more_is_held_than_there_is_and_all_comes_back(
    needs: dict[str, RateLimit], steps: list[tuple[str, str]]
) -> None:
    world = World(needs)
    for what, name in steps:
        world.do(what, name)
    for name in list(world.joined):
        world.do("release", name)
    assert not world.holding
    for name in list(world.joined):  # nothing is lost: each alone has enough
        world.do("acquire", name)
        assert name in world.holding
        world.do("release", name)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, limits)), steps, st.sampled_from(NAMES))
def test_nobody_starves_behind_others_who_ask_again_and_again(
    needs: dict[str, RateLimit], steps: list[tuple[str, str]], poor: str
) -> None:
    world = World(needs)
    for name in NAMES:
        world.do("join", name)
    for what, name in steps:
        if what != "leave":
            world.do(what, name)
    if poor not in world.holding and poor not in world.asked:
        world.do("acquire", poor)
    for _ in range(40):  # each holder finishes and asks again at once
        if poor in world.holding:
            break
        for name in sorted(world.holding) or NAMES:
            world.do("acquire", name)
            if poor in world.holding:
                break
    assert poor in world.holding


def one(priority: int = 1, count: int = 1) -> RateLimit:
    return RateLimit((Resource("gpu", count),), priority)


def turns_of(limiter: RateLimiter, names: list[str], count: int) -> Counter[str]:
    """Return the turns of each process for a resource that exists once, if all always want it."""
    had = Counter[str]()
    turns = [turn for n, name in enumerate(names) for turn in limiter.acquire(name, n + 1)]
    for ticket in range(100, 100 + count):
        (turn,) = turns
        had[turn.process] += 1
        turns = limiter.acquire(turn.process, ticket)
    return had


def test_of_priority_two_an_instance_gets_half_the_turns() -> None:
    limiter = RateLimiter({})
    limiter.join("first", one(1))
    limiter.join("second", one(2))
    assert turns_of(limiter, ["first", "second"], 300) == {"first": 200, "second": 100}


def test_who_was_idle_has_saved_no_turns() -> None:
    limiter = RateLimiter({})
    limiter.join("idle", one())
    limiter.join("busy", one())
    for ticket in range(1, 1001):
        assert limiter.acquire("busy", ticket)
    limiter.release("busy")
    assert turns_of(limiter, ["busy", "idle"], 100) == {"busy": 50, "idle": 50}


def test_who_needs_nothing_of_what_is_short_does_not_wait_behind_it() -> None:
    limiter = RateLimiter({("gpu", EVERYWHERE): 2})
    for name, limit in {
        "small": one(),
        "large": one(count=2),
        "late": one(),
        "other": RateLimit((Resource("disk", 1),)),
    }.items():
        limiter.join(name, limit)
    assert limiter.acquire("small", 1)
    assert limiter.acquire("large", 1) == []
    assert limiter.acquire("late", 1) == []  # one is free, but reserved for `large`
    assert limiter.acquire("other", 1)
    assert limiter.release("small") == [Acquisition("large", 1)]


def test_a_question_may_be_asked_twice() -> None:
    limiter = RateLimiter({})
    limiter.join("a", one())
    limiter.join("b", one())
    assert limiter.acquire("a", 7) == limiter.acquire("a", 7) == [Acquisition("a", 7)]
    assert limiter.acquire("b", 3) == limiter.acquire("b", 3) == []
    assert limiter.leave("a") == [Acquisition("b", 3)]


def test_after_a_restart_what_is_held_counts_before_anybody_has_a_turn() -> None:
    limiter = RateLimiter({}, is_open=False)
    limiter.join("waiting", one())
    assert limiter.acquire("waiting", 1) == []
    limiter.join("holding", one(), holding=9)
    assert limiter.open() == []
    assert limiter.release("holding") == [Acquisition("waiting", 1)]


def test_who_holds_and_who_waits_can_be_told() -> None:
    limiter = RateLimiter({("gpu", EVERYWHERE): 2})
    need = RateLimit((Resource("gpu", 1), Resource("disk", 3, "cpu")))
    for ticket, name in enumerate(("a", "b", "c"), 1):
        limiter.join(name, need)
        limiter.acquire(name, ticket)
    limiter.join("idle", RateLimit((Resource("gpu", 2),)))
    disk, gpu = limiter.uses()
    assert disk == ResourceUse("disk", "cpu", 3, 3, ("a",), ("b", "c"))
    assert gpu == ResourceUse("gpu", "", 2, 1, ("a",), ("b", "c"))
    limiter.release("a")
    assert [use.holders for use in limiter.uses()] == [("b",), ("b",)]
