"""The request's trace, as Python models of Triton's dialect see the trace."""

from __future__ import annotations

import json

from shmserve.executor.backends.triton.pb_utils import InferenceTrace


def test_the_context_is_what_spans_of_the_models_own_take_as_parent() -> None:
    assert InferenceTrace().get_context() is None
    context = InferenceTrace("00-1-2-01").get_context()
    assert context is not None
    assert json.loads(context) == {"traceparent": "00-1-2-01"}
