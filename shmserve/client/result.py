"""Result of an inference."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Any


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
