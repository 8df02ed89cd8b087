"""Statistics, trace and log settings with an unmodified tritonclient.

Separate process: ``triton_settings_client.py HOST:PORT``; any failure is a traceback.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import tritonclient.http as http
import tritonclient.http.aio as aio
from tritonclient.utils import InferenceServerException

LOGS = {
    "log_info": True,
    "log_warning": False,
    "log_error": True,
    "log_verbose_level": 1,
    "log_format": "ISO8601",
}
TRACES = {"trace_level": ["TIMESTAMPS"], "trace_rate": "10", "trace_count": "5"}


def inputs() -> list[http.InferInput]:
    tensor = http.InferInput("IN", [3], "FP32")
    tensor.set_data_from_numpy(np.ones(3, np.float32))
    return [tensor]


def check_statistics(told: Any, model: str, count: int) -> None:
    (stats,) = [row for row in told["model_stats"] if row["name"] == model]
    assert stats["inference_stats"]["success"]["count"] == count, stats


def sync(address: str) -> None:
    client = http.InferenceServerClient(address)
    for _ in range(3):
        client.infer("echo", inputs())
    check_statistics(client.get_inference_statistics(), "echo", 3)
    check_statistics(client.get_inference_statistics("echo"), "echo", 3)
    check_statistics(client.get_inference_statistics("echo", "1"), "echo", 3)
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("echo", TRACES)["trace_rate"] == "10"
    assert client.get_trace_settings("echo")["trace_count"] == "5"
    cleared = {"trace_level": None, "trace_rate": None, "trace_count": None}
    assert client.update_trace_settings("echo", cleared) == client.get_trace_settings()
    assert client.update_log_settings(LOGS).items() >= LOGS.items()
    assert client.get_log_settings().items() >= LOGS.items()
    for change, settings in (
        (client.update_trace_settings, {"trace_file": "/tmp/x"}),
        (client.update_log_settings, {"log_file": "/tmp/x"}),
    ):
        try:
            change(settings=settings)
        except InferenceServerException as ex:
            if ex.status() != "501":
                raise
        else:
            raise AssertionError("a file was taken")
    client.close()


async def asynchronous(address: str) -> None:
    async with aio.InferenceServerClient(address) as client:
        await client.infer("echo", inputs())
        check_statistics(await client.get_inference_statistics("echo"), "echo", 4)
        assert (await client.update_trace_settings("echo", TRACES))["trace_rate"] == "10"
        assert (await client.get_trace_settings("echo"))["trace_count"] == "5"
        changed = await client.update_log_settings({"log_format": "default"})
        assert changed == await client.get_log_settings()
        assert changed["log_format"] == "default"


if __name__ == "__main__":
    sync(sys.argv[1])
    asyncio.run(asynchronous(sys.argv[1]))
