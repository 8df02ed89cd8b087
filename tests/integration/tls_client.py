"""An unmodified tritonclient with ssl=True, over HTTP and gRPC. Prints PASS."""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

http, grpc, folder = sys.argv[1:]
shown = {"ca_certs": f"{folder}/ca.pem", "certfile": f"{folder}/client.pem"}
shown["keyfile"] = f"{folder}/client.key"
clients = (
    (httpclient, httpclient.InferenceServerClient(http, ssl=True, ssl_options=shown)),
    (
        grpcclient,
        grpcclient.InferenceServerClient(
            grpc,
            ssl=True,
            root_certificates=shown["ca_certs"],
            private_key=shown["keyfile"],
            certificate_chain=shown["certfile"],
        ),
    ),
)
for module, client in clients:
    assert client.is_server_ready()
    for size in (3, 1 << 20):
        array = np.arange(size, dtype=np.float32)
        given = module.InferInput("IN", array.shape, "FP32")
        given.set_data_from_numpy(array)
        assert np.array_equal(client.infer("echo", [given]).as_numpy("OUT"), array)
    client.close()
print("PASS")
