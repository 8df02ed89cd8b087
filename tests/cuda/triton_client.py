"""A program with tritonclient's own module for CUDA shared memory. Prints PASS.

triton_client.py http|grpc ADDRESS MODEL
"""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.cuda_shared_memory as cudashm

library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[sys.argv[1]]
client = library.InferenceServerClient(sys.argv[2])
client.unregister_system_shared_memory()
client.unregister_cuda_shared_memory()

values = np.arange(16, dtype=np.float32)
size = values.nbytes
output = cudashm.create_shared_memory_region("output_data", size, 0)
given = cudashm.create_shared_memory_region("input_data", size, 0)
cudashm.set_shared_memory_region(given, [values])
for name, region in (("output_data", output), ("input_data", given)):
    client.register_cuda_shared_memory(name, cudashm.get_raw_handle(region), 0, size)
status = client.get_cuda_shared_memory_status()
assert len(status if isinstance(status, list) else status.regions) == 2

inputs = [library.InferInput("IN", [16], "FP32")]
inputs[-1].set_shared_memory("input_data", size)
outputs = [library.InferRequestedOutput("OUT")]
outputs[-1].set_shared_memory("output_data", size)
results = client.infer(model_name=sys.argv[3], inputs=inputs, outputs=outputs)

told = results.get_output("OUT")
assert told is not None
shape = told["shape"] if isinstance(told, dict) else list(told.shape)
found = cudashm.get_contents_as_numpy(output, np.float32, shape)
np.testing.assert_array_equal(found, values + 1)

client.unregister_cuda_shared_memory()
status = client.get_cuda_shared_memory_status()
assert not (status if isinstance(status, list) else status.regions)
cudashm.destroy_shared_memory_region(given)
cudashm.destroy_shared_memory_region(output)
assert cudashm.allocated_shared_memory_regions() == []
print("PASS")
