"""The object that a model's `auto_complete_config` fills in."""

from __future__ import annotations

from typing import Any

import msgspec

_REQUIRED = {"name", "data_type", "dims"}


class AutoCompleteConfig:
    """A configuration in its JSON form, with the methods Triton's models call.

    What the configuration file tells is never overruled: a call must agree with it.
    """

    def __init__(self, config_json: str) -> None:
        self._config: dict[str, Any] = msgspec.json.decode(config_json)

    def as_dict(self) -> dict[str, Any]:
        """The configuration so far, with the schema's names."""
        return self._config

    def json(self) -> str:
        return msgspec.json.encode(self._config).decode()

    def set_max_batch_size(self, max_batch_size: int) -> None:
        told = self._config.get("max_batch_size", 0)
        if told > max_batch_size:
            raise ValueError(
                f"max_batch_size is {told} in the configuration, "
                f"auto_complete_config sets {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, _REQUIRED | {"optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, _REQUIRED)

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        if set(policy) != {"decoupled"}:
            raise ValueError("model_transaction_policy has exactly one property, 'decoupled'")
        self._config["model_transaction_policy"] = {"decoupled": bool(policy["decoupled"])}

    def set_dynamic_batching(self) -> None:
        # refused by name when the result is checked, as in a configuration file
        self._config.setdefault("dynamic_batching", {})

    def _add(self, kind: str, tensor: dict[str, Any], allowed: set[str]) -> None:
        unknown = sorted(tensor.keys() - allowed)
        missing = sorted(_REQUIRED - tensor.keys())
        if unknown or missing:
            what = f"unknown property '{unknown[0]}'" if unknown else f"no '{missing[0]}'"
            raise ValueError(f"an {kind} of auto_complete_config has {what}")
        entries = self._config.setdefault(kind, [])
        new = {**tensor, "dims": [int(dim) for dim in tensor["dims"]]}
        for entry in entries:
            if entry["name"] != new["name"]:
                continue
            for key in ("data_type", "dims"):
                if entry[key] != new[key]:
                    raise ValueError(
                        f"{kind} '{new['name']}' has {key} {entry[key]} in the configuration, "
                        f"auto_complete_config adds {new[key]}"
                    )
            return
        entries.append(new)
