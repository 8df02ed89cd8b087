"""The thin layer over CuPy: devices, memory of other processes, pinned host memory.

Imported by executors whose instance runs on a GPU or whose request names memory of one, by
clients that ask for device arrays, and by `shmserve doctor`; by nobody else.

So no process that forks, accepts connections or keeps the registry can be hurt by a driver.
`core.device_names` decides from names which device an instance gets. The executor opens it
(`executor.devices`) before the model's code runs.

The way of a tensor:

- In: a tensor in a slot or a system region is brought to the device by one DMA, on a stream of its
  own, before the model runs. Then the same begins for the next request, so its input arrives while
  this one computes. The memory is pinned when a copy first needs it (`pins`): each mapping as a
  whole, frontends' segments with the read-only flag. A device without that flag gets a second,
  writable mapping (`shm.segment.WritableMapping`). Where the driver refuses, copies go through its
  own buffers.
- In, CUDA region: the handle is opened once (`ipc`). The region keeps it open while registered, and
  so does each array on it. So a model that keeps an input cannot lose the memory under it.
- Compute: on the device's default stream. Inputs are complete there, and on the stream that CuPy
  uses in the thread that asks for them. Outputs of models that use other streams are waited for,
  too.
- Out: an array that was made in the client's region is there already. Others are copied once, to a
  slot, a system region, or a region of the same or of another GPU.
- Before the answer the executor waits for the whole device. Nothing leaves that is not there, and
  no slot comes back that is still being read.

Bytes moved by DMA (`device` in the receipt):

    CUDA region to CUDA region of the same device, model writes into the offered output    0
    slot or system region in and out                                          input + output
    CUDA region on another device, if the devices reach each other            once each way
    CUDA region, model on the CPU, or a model that wants numpy arrays         once each way
    window not aligned to 16 bytes                                            once

An error that CUDA cannot recover from costs the request that caused it a 500 and ends the executor,
by SIGKILL to itself: unwinding would call the driver. Requests that wait there run elsewhere or get
502. Running out of device memory is 503 and nothing more.
"""
