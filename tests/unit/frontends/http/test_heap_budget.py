"""Heap limits of request bodies: per request, and for all requests together."""

import gc
import gzip
import json
import threading
from typing import Any

import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.errors import TooLarge, Unavailable
from shmserve.frontends.heap_budget import BUDGET, FREE, HeapBudget
from shmserve.frontends.http.routes.inference.body_heap import JSON_COST, BodyHeap
from shmserve.frontends.http.routes.inference.body_reader import PieceReader, open_body
from tests.unit.http_client import INFER, Body, Client, as_json, error_of

SIZE = 3 << 20


def gzipped(text: bytes) -> tuple[bytes, dict[str, str]]:
    return gzip.compress(text), {"Content-Encoding": "gzip"}


@pytest.mark.parametrize("form", ["plain json", "inflated json", "inflated raw"])
def test_a_body_beyond_the_budget_is_refused_and_leaves_nothing(form: str) -> None:
    client = Client(Settings(max_heap_bytes=1 << 20))
    text = b" " * SIZE
    headers: dict[str, str] = {}
    if form != "plain json":
        text, headers = gzipped(text)
    if form == "inflated raw":
        headers["Inference-Header-Content-Length"] = "0"
    answer = client.ask("POST", INFER, text, headers)
    assert "max_heap_bytes" in error_of(answer, 413)
    del answer
    assert BUDGET.used == 0


def test_a_request_gives_back_what_it_took() -> None:
    client = Client(Settings())
    seen: list[int] = []
    model = client.dispatcher.functions["identity"]

    def look(given: Any) -> Any:
        seen.append(BUDGET.used)
        return model(given)

    client.dispatcher.functions["identity"] = look
    values = np.zeros(1 << 20, np.float32).tolist()
    body, headers = gzipped(json.dumps({"inputs": [as_json(values)]}).encode())
    gc.disable()  # released heap is given back at once
    try:
        answer = client.ask("POST", INFER, body, headers)
        assert answer.status == 200
        del answer
        assert BUDGET.used == 0
    finally:
        gc.enable()
    assert seen[0] > FREE * JSON_COST


def test_what_others_have_is_not_there_and_comes_back() -> None:
    budget, limits = HeapBudget(), Settings(max_heap_bytes=100)
    first: dict[str, Any] = {}
    BodyHeap(first, limits, budget).take(60)
    with pytest.raises(Unavailable, match="max_heap_bytes"):
        BodyHeap({}, limits, budget).take(60)
    with pytest.raises(TooLarge, match="max_heap_bytes"):
        BodyHeap({}, limits, budget).take(101)
    BodyHeap(first, limits, budget).take(40)
    first.clear()
    assert budget.used == 0


def test_small_bodies_are_free() -> None:
    budget = HeapBudget()
    heap = BodyHeap({}, Settings(), budget)
    reader = PieceReader(iter([bytes(FREE)]), 2 * FREE, heap=heap)
    assert len(reader.read_rest(FREE, "max_json_bytes")) == FREE
    assert budget.used == 0


def test_what_was_announced_takes_nothing_before_it_comes() -> None:
    body = bytes(2 << 20)
    environ = {"wsgi.input": Body(body), "CONTENT_LENGTH": str(1 << 30)}
    reader = open_body(environ, Settings(max_heap_bytes=JSON_COST * len(body)))
    with pytest.raises(Exception, match="ended early"):
        reader.read_rest(1 << 30, "max_json_bytes")
    environ.clear()
    assert BUDGET.used == 0


def test_a_body_may_end_while_another_is_counted() -> None:
    """Python may collect garbage at any point, also under the lock of the budget."""
    budget = HeapBudget()

    def work() -> None:
        environ: dict[str, Any] = {}
        BodyHeap(environ, Settings(), budget).take(60)
        with budget._lock:
            environ.clear()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert budget.used == 0
