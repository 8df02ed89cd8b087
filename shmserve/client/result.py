"""Call of a client, and the result of an inference."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from shmserve.client.tensors import ClientTensor


class ClientCall(Struct, frozen=True):
    """Arguments of `infer` or `stream`, before a lane or HTTP is chosen.

    Attributes:
        outputs: names of the requested outputs; None: all.
        timeout_s: seconds until the answer, or the last answer of a stream, is due.
    """

    model: str
    version: str
    inputs: Sequence[ClientTensor]
    outputs: tuple[str, ...] | None
    device: int | None
    timeout_s: float
    parameters: Mapping[str, Any] | None
    request_id: str
    receipt: bool


class Result(Mapping[str, Any]):
    """Output arrays by name: numpy arrays, or CuPy arrays if a GPU was requested. Arrays are
    writable and stay valid while referenced.

    Attributes:
        model: model name.
        version: model version that answered.
        id: request id.
        parameters: response parameters.
        receipt: copied bytes and times, if a receipt was requested.
        transport: "lane" or "http".
    """

    def __init__(
        self,
        arrays: dict[str, Any],
        document: dict[str, Any],
        receipt: dict[str, Any] | None,
        transport: str = "http",
    ) -> None:
        self._arrays = arrays
        self.model = str(document.get("model_name", ""))
        self.version = str(document.get("model_version", ""))
        self.id = str(document.get("id", ""))
        self.parameters: dict[str, Any] = document.get("parameters") or {}
        self.receipt = receipt
        self.transport = transport

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def items(self) -> ItemsView[str, Any]:
        return self._arrays.items()

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}: {a.dtype}{list(a.shape)}" for n, a in self._arrays.items())
        return f"<Result of {self.model}: {shown}>"
