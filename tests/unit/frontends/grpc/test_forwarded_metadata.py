"""Metadata that become parameters, and metadata that decide about access."""

from typing import Any

import numpy as np
import pytest

from tests.grpc_client import Rig, request
from tests.unit.frontends.key_files import KEY, one_key


def parameters(rig: Rig) -> dict[str, Any]:
    return rig.dispatcher.calls[-1].request.parameters


def test_metadata_become_parameters() -> None:
    with Rig(grpc_header_forward_pattern="my_header.*") as rig:
        metadata = (("my_header_1", "one"), ("other", "no"), ("my_header-bin", b"\0"))
        for _ in range(2):  # the second message is known already
            rig.client.infer(request(my_header_1="forged", own=1), metadata=metadata)
            assert parameters(rig) == {"my_header_1": "one", "own": 1}
        rig.client.infer(request(), metadata=(("my_header_1", "a"), ("my_header_1", "b")))
        assert parameters(rig) == {"my_header_1": "a,b"}
        rig.client.infer(request())
        assert parameters(rig) == {}
        large = request(np.zeros(1 << 16, np.float32))
        rig.client.infer(large, metadata=metadata)
        assert parameters(rig) == {"my_header_1": "one"}
        (answer,) = rig.client.stream([request()], metadata=metadata)
        assert not answer.error_message
        assert parameters(rig) == {"my_header_1": "one"}


def test_nothing_is_forwarded_without_a_pattern_or_in_another_case() -> None:
    for settings in ({}, {"grpc_header_forward_pattern": "(?-i)MY_HEADER.*"}):
        with Rig(**settings, http_header_forward_pattern=".*") as rig:  # type: ignore[arg-type]
            rig.client.infer(metadata=(("my_header_1", "one"),))
            assert parameters(rig) == {}


@pytest.mark.parametrize("key", ["sequence_id", "sequence-id", "triton_x", "priority", "headers"])
def test_reserved_keys_are_refused(key: str) -> None:
    with Rig(grpc_header_forward_pattern=".*") as rig:
        code, details = rig.client.error("ModelInfer", request(), metadata=((key, "1"),))
        assert code == "INVALID_ARGUMENT"
        assert f"header '{key}' cannot be forwarded" in details
        assert "reserved for Triton usage" in details


def test_no_model_sees_a_key(tmp_path) -> None:
    with Rig(grpc_header_forward_pattern="auth|key|^x", **one_key(tmp_path)) as rig:
        for field, value in (("authorization", f"Bearer {KEY}"), ("shmserve-key", KEY)):
            rig.client.infer(metadata=((field, value), ("x", "1")))
            assert parameters(rig) == {"x": "1"}
        both = (("shmserve-key", KEY), ("authorization", "Basic eA=="))
        rig.client.infer(metadata=both)
        assert parameters(rig) == {"authorization": "Basic eA=="}
        alike = (("shmserve-key", KEY), ("shmserve_key", "x"))
        code, details = rig.client.error("ModelInfer", request(), metadata=alike)
        assert (code, "differ only in - and _" in details) == ("INVALID_ARGUMENT", True)


def test_a_secret_under_two_names_decides_nothing() -> None:
    with Rig(grpc_restricted_protocol=("metadata:my_key=s",)) as rig:
        good = ("triton-grpc-protocol-my_key", "s")
        assert rig.client.call("ServerMetadata", metadata=(good,)).name
        hyphen = ("triton-grpc-protocol-my-key", "s")
        assert rig.client.error("ServerMetadata", metadata=(hyphen,))[0] == "UNAVAILABLE"
        code, details = rig.client.error("ServerMetadata", metadata=(good, hyphen))
        assert (code, "differ only in - and _" in details) == ("INVALID_ARGUMENT", True)
