"""gRPC requests give the dispatcher their caller number."""

import os

from shmserve.core.caller import caller_number
from tests.grpc_client import Client, Rig


def test_requests_say_whose_they_are(tmp_path) -> None:
    address = f"unix:{tmp_path}/grpc.sock"
    with Rig(also=address) as rig, Client(address) as other:
        rig.client.infer()
        other.infer()
        over_tcp, over_unix = (call.options.caller_number for call in rig.dispatcher.calls)
        assert over_tcp == caller_number("address", "127.0.0.1")
        user = caller_number("user", str(os.geteuid()))
        assert over_unix == user
