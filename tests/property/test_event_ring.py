"""A ring of events is readable after its writer was killed at any point, even within a record."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.stats.event_ring import RECORD_BYTES, EventRing, decode

STEPS = st.tuples(
    st.sampled_from(["a", "b", "c" * 100, "ü" * 40]), st.sampled_from([0.0, 0.4, 0.999, 1.0, 7.0])
)


def replay(steps, records):
    """Yield the file before and at each write, with the events that should count until then."""
    ring, file, now = EventRing(records), bytearray(), 1000.0
    told: list = []  # [subject, first, last, count]
    for subject, pause in steps:
        now += pause
        before, expected = bytes(file), [list(event) for event in told]
        same = next((e for e in reversed(told) if e[0] == subject), None)
        if same and now - same[2] < 1 and same in told[-records:]:
            same[2:] = now, same[3] + 1
        else:
            told.append([subject, now, now, 1])
        offset, record = ring.add(now, "kind", subject)
        assert len(record) == RECORD_BYTES
        file[offset : offset + RECORD_BYTES] = record
        yield before, expected, offset, record, [list(event) for event in told]


def read(file):
    return [[e.subject, e.first, e.last, e.count] for e in decode(bytes(file))]


def clipped(told, records):
    """Return events as a reader gets them."""
    return [
        [subject.encode()[:64].decode(errors="ignore"), *rest] for subject, *rest in told[-records:]
    ]


@given(st.lists(STEPS, max_size=40), st.integers(1, 9), st.integers(0, RECORD_BYTES - 1))
def test_every_prefix_is_read_whole_and_a_torn_record_costs_at_most_its_place(steps, records, cut):
    for before, told, offset, record, after in replay(steps, records):
        assert read(before) == clipped(told, records)
        torn = bytearray(before)
        torn[offset : offset + cut] = record[:cut]
        old, new = clipped(told, records), clipped(after, records)
        place = offset // RECORD_BYTES
        others = [e for e, number in numbered(old, told) if (number - 1) % records != place]
        assert read(torn) in (others, old, new)


def numbered(events, told):
    first = len(told) - len(events) + 1
    return [(event, first + index) for index, event in enumerate(events)]


@given(st.binary(max_size=4 * RECORD_BYTES))
def test_whatever_a_file_holds_can_be_read(data):
    decode(data)


def test_a_flood_is_one_record_and_does_not_push_out_what_led_to_it():
    ring, file = EventRing(8), bytearray()
    for step in range(10_000):
        kind = "process ended" if step == 0 else "request failed"
        offset, record = ring.add(1000 + step * 0.01, kind, "model/1")
        file[offset : offset + RECORD_BYTES] = record
    assert [(e.kind, e.count) for e in decode(bytes(file))] == [
        ("process ended", 1),
        ("request failed", 9_999),
    ]


def test_texts_show_no_control_characters():
    _, record = EventRing(1).add(0.0, "kind", "a\x1b[31m\nb", "x\0y")
    (event,) = decode(record)
    assert (event.subject, event.text) == ("a [31m b", "x y")
