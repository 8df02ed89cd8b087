"""Calls with tritonclient that use system shared memory. Prints PASS."""

import sys

import numpy as np
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm

client = httpclient.InferenceServerClient(sys.argv[1])
client.unregister_system_shared_memory()
client.unregister_cuda_shared_memory()

values = np.arange(1024, dtype=np.float32)
size = values.nbytes
output = shm.create_shared_memory_region("output_data", "/output_simple", size)
client.register_system_shared_memory("output_data", "/output_simple", size)
given = shm.create_shared_memory_region("input_data", "/input_simple", size)
shm.set_shared_memory_region(given, [values])
client.register_system_shared_memory("input_data", "/input_simple", size)

inputs = [httpclient.InferInput("IN", [1024], "FP32")]
inputs[-1].set_shared_memory("input_data", size)
outputs = [httpclient.InferRequestedOutput("OUT", binary_data=True)]
outputs[-1].set_shared_memory("output_data", size)
results = client.infer(model_name="touch", inputs=inputs, outputs=outputs)

told = results.get_output("OUT")
assert told is not None, "no output"
found = shm.get_contents_as_numpy(output, np.float32, told["shape"])
np.testing.assert_array_equal(found, values + 1)
assert len(client.get_system_shared_memory_status()) == 2
client.unregister_system_shared_memory()
assert client.get_system_shared_memory_status() == []
del found
shm.destroy_shared_memory_region(given)
shm.destroy_shared_memory_region(output)
assert shm.mapped_shared_memory_regions() == []
print("PASS")
