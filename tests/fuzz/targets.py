"""Parsers that foreign bytes reach, and how each is fuzzed.

A target takes any bytes and raises an exception if the code under test fails: with an undocumented
error, or with an answer that differs from the input. A function with the target's name and
`_seeds` returns inputs from our own encoders.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from tests.fuzz import (
    file_targets,
    http2_targets,
    http_targets,
    message_targets,
    request_targets,
    value_targets,
)

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 4096  # bytes of an input
Target = Callable[[bytes], None]

_TARGETS: dict[ModuleType, tuple[str, ...]] = {
    http_targets: ("connection", "inference", "oip_json", "generate"),
    request_targets: (
        *("model_infer", "grps_wire", "grps_json", "bytes_tensor"),
        *("config_pbtxt", "config_json"),
    ),
    value_targets: ("form", "plain_values"),
    message_targets: ("control", "lane"),
    file_targets: ("settings_toml", "keys_toml", "index_json"),
    http2_targets: ("http2", "http2_calls", "hpack_block", "grpc_messages", "grpc_fields"),
}
TARGETS: dict[str, Target] = {
    name: getattr(module, name) for module, names in _TARGETS.items() for name in names
}
SEEDS: dict[str, list[bytes]] = {
    name: getattr(module, f"{name}_seeds")() for module, names in _TARGETS.items() for name in names
}
# Words that coverage does not find, because C code compares them.
WORDS = (
    *(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n", b"\r\n", b"0\r\n"),
    *(b"Inference-Header-Content-Length: ", b"Content-Encoding: deflate\r\n", b"HTTP/1.1"),
    *(b'"binary_data_size":', b'"shared_memory_region":', b'"parameters":{', b'"data":[', b'"id":'),
    *(b"NaN", b"1e999", b"-1", b"18446744073709551616", b"null", b"true", b'"\\ud800"', b"[[[["),
    *(b"\xff\xff\xff\xff\x0f", b"\x80" * 10, b"\x00", b"\xff", b"\x7f", b"\xc0", b"\xdc\xff\xff"),
    *(b"PRI * HTTP/2.0", b"\x3f\xe1\x1f", b"dims: [ 0 ]", b"data_type: TYPE_", b"{", b"}", b"\\x"),
)


def inputs(name: str) -> list[bytes]:
    """Return the seeds of a target and the inputs kept from campaigns."""
    kept = sorted((CORPUS / name).glob("*"))
    return [*SEEDS[name], *(path.read_bytes() for path in kept)]


def mutated(rng: random.Random, data: bytes, other: bytes, words: Sequence[bytes] = WORDS) -> bytes:
    """Return an input with a few changes, or the beginning of one input and the end of another."""
    if rng.random() < 0.1:
        return (data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :])[
            :LONGEST
        ]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(7)
        if kind == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 4))
        elif kind == 3:
            changed[at:at] = rng.choice(words)
        elif kind == 4:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.randint(1, 40)]
        elif at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed[:LONGEST])
