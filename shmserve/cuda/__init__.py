"""Thin layer over CuPy: devices, device memory of other processes, pinned host memory.

Imported only by executors whose instance runs on a GPU or whose request names GPU memory, by
clients that ask for device arrays, and by `shmserve doctor`. So a driver cannot harm any process
that forks, accepts connections or keeps the registry. `core.device_names` derives the device of an
instance from names. The executor opens the device (`executor.devices`) before the model's code
runs.

Path of a tensor:

- In: one DMA on a separate stream brings a tensor from a slot or a system region to the device
  before the model runs. The next request's copy then starts at once, so its input arrives during
  the computation. Memory is pinned when a copy first needs it (`pins`): each mapping as a whole,
  segments of frontends with the read-only flag. For a device without this flag, the segment is
  mapped a second time, writable (`shm.segment.WritableMapping`). Where the driver refuses to pin,
  copies go through the driver's buffers.
- In, CUDA region: the handle is opened once (`ipc`). The handle stays open while the region is
  registered and while any array uses the memory, so a model can safely keep an input.
- Compute: on the device's default stream. Inputs are complete there, and on CuPy's current stream
  of the thread that asks for inputs. If a model uses other streams, the executor waits for the
  outputs there, too.
- Out: an array that was made in the client's region is already in place. Other arrays are copied
  once, to a slot, a system region, or a region of any GPU.
- Before an answer, the executor waits for the whole device. So every output is complete, and no
  returned slot is still being read.

Bytes moved by DMA (`device` in the receipt):

  CUDA region to CUDA region of the same device, model writes into the offered output    0
  slot or system region in and out                                          input + output
  CUDA region on another device, if the devices reach each other            once each way
  CUDA region, model on the CPU, or a model that wants numpy arrays         once each way
  window not aligned to 16 bytes                                            once

An unrecoverable CUDA error gives the causing request a 500 and ends the executor. The executor
kills itself by SIGKILL, because unwinding would call the driver. Requests waiting there run
elsewhere or get 502. Running out of device memory only gives a 503.
"""
