"""What an inference gives."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Any


class Result(Mapping[str, Any]):
    """Output arrays by name, numpy's or, where a GPU was asked for, CuPy's. They may be written
    to, and stay valid while referenced.

    Attributes:
        model: the model's name.
        version: the version that answered.
        id: the request's id.
        parameters: the response's.
        receipt: what was copied and how long it took, if it was asked for.
        transport: the way it came, "lane" or "http".
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
