"""Short form of the fuzzer: every mutated frame ends in events."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.frontends.http2.grpc_framing import FramingFailed, MessageReader, prefix
from tests.fuzz.http2 import fuzz


def test_mutated_traffic_does_nothing_but_what_limits_allow() -> None:
    counts = fuzz(30_000, seed=1)
    for seen in ("RequestReceived", "DataReceived", "TrailersReceived", "StreamReset"):
        assert counts[seen] > 20, counts
    for code in ("PROTOCOL_ERROR", "COMPRESSION_ERROR", "FRAME_SIZE_ERROR"):
        assert counts[code] > 0, counts


@given(
    st.lists(st.tuples(st.booleans(), st.binary(max_size=30)), max_size=5),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(10, 40),
)
def test_messages_are_read_in_any_pieces(
    messages: list[tuple[bool, bytes]], steps: list[int], limit: int
) -> None:
    data = b"".join(prefix(len(body), flag) + body for flag, body in messages)
    reader = MessageReader(limit)
    found = []
    try:
        turn = 0
        while data:
            step = steps[turn % len(steps)]
            turn += 1
            space = reader.space()
            if space is not None and turn % 2:
                piece = data[: min(step, len(space))]
                space[: len(piece)] = piece
                message = reader.filled(len(piece))
                found += [] if message is None else [message]
            else:
                piece = data[:step]
                found += reader.feed(memoryview(piece))
            data = data[len(piece) :]
        reader.finish()
    except FramingFailed:
        assert any(len(body) > limit for _, body in messages)
        return
    assert [(m.compressed, bytes(m.data)) for m in found] == messages
