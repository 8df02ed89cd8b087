"""Telemetry of libraries, and output of their C code: switched off by environment variables.

A library reads its variable when it is imported, in any process. So the variables are set where
all processes begin, in gunicorn's master and in `shmserve`'s commands, and are inherited.
Libraries without a row send nothing of their own accord: numpy, torch, CuPy, grpcio, gunicorn,
Falcon, OpenTelemetry's SDK, fsspec and its stores for S3, Google and Azure.
"""

from collections.abc import MutableMapping

_OFF = {
    # Since 1.32 events sent to Microsoft, and an id of the device and a database in ~/.cache
    "ORT_DISABLE_TELEMETRY": "1",
    # Events of huggingface_hub; the report of each transfer by hf_xet
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Ray's report of the cluster
    "RAY_USAGE_STATS_ENABLED": "0",
}


_SILENT = {
    # gRPC's C core writes to descriptor 2 itself, and so waits for the reader of the log
    "GRPC_VERBOSITY": "NONE",
}


def switch_off(environ: MutableMapping[str, str]) -> None:
    """Switch telemetry and output off; a variable that is set keeps its value."""
    for variable, value in (_OFF | _SILENT).items():
        environ.setdefault(variable, value)
