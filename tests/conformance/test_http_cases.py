"""Recorded requests of the inference protocol against a real server.

The fixture `conformance_server` serves `tests/repositories/conformance/`, with `http_host` and
`http_port`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.conformance_runner import judge, load_cases, send

CASES = load_cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{c['group']}-{c['name']}" for c in CASES])
def test_case(case: dict[str, Any], conformance_server: Any) -> None:
    answer = send(case, conformance_server.http_host, conformance_server.http_port)
    assert not judge(case, answer)
