"""The CUDA driver's functions, by CuPy's names."""

from cupy import _fake

ctxGetCurrent = _fake.get_context


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR_{status}")
