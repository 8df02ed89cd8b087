"""Weight of a host: bounds, what lowers the weight, and that hosts which share load settle."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.core.control.free_capacity import HALVING, ModelLoad, percent

POOL = 1 << 30
COUNTS = st.integers(0, 1 << 20)
LOADS = st.builds(ModelLoad, st.integers(0, 64), st.integers(0, 64), COUNTS)
MODELS = st.lists(LOADS, max_size=8)


@given(
    st.lists(st.builds(ModelLoad, *[st.integers()] * 3), max_size=8), st.integers(), st.integers()
)
def test_whatever_pages_say_it_is_a_weight(models, used, pool):
    assert 1 <= percent(models, used, pool) <= 100


@given(st.lists(st.integers(0, 64), max_size=8), st.integers(1, POOL))
def test_an_idle_host_is_all_free(counts, pool):
    assert percent([ModelLoad(n, n, 0) for n in counts], 0, pool) == 100


@given(MODELS, st.data(), st.integers(0, POOL), st.integers(0, POOL), st.integers(1, 1000))
def test_nothing_that_is_taken_makes_it_more(models, data, used, more_used, more):
    before = percent(models, used, POOL)
    assert percent(models, max(used, more_used), POOL) <= before
    assume(models)
    index = data.draw(st.integers(0, len(models) - 1))
    longer = [*models]
    longer[index] = replace(models[index], waiting=models[index].waiting + more)
    assert percent(longer, used, POOL) <= before
    fewer = [*models]
    fewer[index] = replace(models[index], live=max(0, models[index].live - more))
    assert percent(fewer, used, POOL) <= before


@given(MODELS, st.integers(0, POOL), st.integers(1, 64))
def test_a_host_that_is_larger_in_everything_is_as_free(models, used, times):
    """The balancer's own weights express the difference between hosts of different sizes."""
    larger = [ModelLoad(m.wanted * times, m.live * times, m.waiting * times) for m in models]
    assume(all(m.live for m in models))
    assert percent(larger, used * times, POOL * times) == percent(models, used, POOL)


def test_the_figures_that_the_documents_have():
    assert percent([ModelLoad(4, 3, 0)], 0, POOL) == 75
    assert percent([ModelLoad(2, 2, 2 * HALVING)], 0, POOL) == 50
    assert percent([ModelLoad(1, 1, 0), ModelLoad(1, 1, 3 * HALVING)], 0, POOL) == 25
    assert percent([ModelLoad(1, 1, 0)], POOL * 9 // 10, POOL) == 10
    assert percent([ModelLoad(1, 1, 1 << 20)], POOL, POOL) == 1


@settings(max_examples=40)
@given(
    st.integers(2, 16),
    st.integers(1, 4000),
    st.lists(st.floats(0.05, 1.0), min_size=16, max_size=16),
)
def test_hosts_that_share_requests_by_weight_settle(hosts, waiting, start):
    """Equal hosts share `waiting` requests. Each look at the weights changes the shares. However
    uneven at first, the shares are about equal after many looks."""
    shares = [part / sum(start[:hosts]) for part in start[:hosts]]
    for _ in range(60):
        weights = [
            percent([ModelLoad(100, 100, round(100 * waiting * share))], 0, POOL)
            for share in shares
        ]
        wanted = [weight / sum(weights) for weight in weights]
        # Waiting requests stay on their host; half of the requests are new at the next look
        shares = [(share + new) / 2 for share, new in zip(shares, wanted, strict=True)]
    assert max(shares) <= 1.5 * min(shares) + 0.02
