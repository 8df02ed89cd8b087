"""Call of a client, and the result of an inference."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, Self

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
        about: tuple[str, str, str],
        parameters: dict[str, Any],
        receipt: dict[str, Any] | None,
        transport: str = "http",
    ) -> None:
        """`about`: model name, model version and request id."""
        self._arrays = arrays
        self.model, self.version, self.id = about
        self.parameters = parameters
        self.receipt = receipt
        self.transport = transport

    @classmethod
    def from_document(
        cls, arrays: dict[str, Any], document: dict[str, Any], receipt: dict[str, Any] | None
    ) -> Self:
        """Return the result of an answer over HTTP, given its JSON."""
        words = [str(document.get(key, "")) for key in ("model_name", "model_version", "id")]
        about = (words[0], words[1], words[2])
        return cls(arrays, about, document.get("parameters") or {}, receipt)

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
