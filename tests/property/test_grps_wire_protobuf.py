"""Our reading and writing of GRPS messages is protobuf's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmserve._generated import grps_pb2
from shmserve.errors import InvalidArgument
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import GrpsMessage
from tests.property.test_grps_wire_properties import messages, same


@given(messages)
def test_protobuf_reads_what_we_write_and_we_what_it_writes(message: GrpsMessage) -> None:
    wire = message_wire.encode(message)
    read = grps_pb2.GrpsMessage.FromString(wire)
    assert (read.WhichOneof("data_oneof") or "") == message.which
    assert same(message_wire.parse(read.SerializeToString()), message)
    assert read.SerializeToString(deterministic=True) == grps_pb2.GrpsMessage.FromString(
        message_wire.encode(message_wire.parse(wire))
    ).SerializeToString(deterministic=True)


@given(st.lists(st.one_of(messages.map(message_wire.encode), st.binary(max_size=6)), max_size=3))
def test_bytes_that_both_accept_mean_the_same(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    try:
        theirs = grps_pb2.GrpsMessage.FromString(data)
    except Exception:
        return  # we may accept input that protobuf refuses, and we refuse unknown groups
    try:
        ours = message_wire.parse(data)
    except InvalidArgument:
        return
    again = grps_pb2.GrpsMessage.FromString(message_wire.encode(ours))
    assert again.WhichOneof("data_oneof") == theirs.WhichOneof("data_oneof")
    theirs.DiscardUnknownFields()  # unknown fields of the status, too, which we do not keep
    assert (again.model, again.status) == (theirs.model, theirs.status)
    assert again.SerializeToString(deterministic=True) == theirs.SerializeToString(
        deterministic=True
    )
