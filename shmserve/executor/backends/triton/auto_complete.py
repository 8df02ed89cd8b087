"""Configuration object that a model's `auto_complete_config` fills in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.errors import ConfigError
from shmserve.protocol.triton_config import model_config
from shmserve.repository import read_labels
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import ModelSpec

_REQUIRED = ("name", "data_type", "dims")
_SCHEDULERS = ("sequence_batching", "ensemble_scheduling")


class AutoCompleteConfig:
    """Configuration as a dictionary, with the methods that Triton's models call.

    A call must agree with the values of the configuration file, and never overrules them. `source`
    is the source of the calls, for messages.
    """

    def __init__(self, config: ConfigDocument, source: str = "auto_complete_config") -> None:
        self._config = config.as_dict()
        self._source = source

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration so far, with the schema's names."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"max_batch_size is {configured} in the configuration, "
                f"{self._source} sets {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, (*_REQUIRED, "optional"))

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, _REQUIRED)

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        unknown = sorted(set(policy) - {"decoupled"})
        if unknown:
            raise ValueError(
                f"model_transaction_policy of auto_complete_config has unknown property "
                f"'{unknown[0]}', it may only have 'decoupled'"
            )
        # a file without the field also means false
        configured = self._config.get("model_transaction_policy", {}).get("decoupled", False)
        decoupled = bool(policy.get("decoupled", configured))
        if configured and not decoupled:
            raise ValueError(
                "model_transaction_policy is decoupled in the configuration, "
                f"{self._source} sets it to false"
            )
        self._config["model_transaction_policy"] = {"decoupled": decoupled}

    def set_dynamic_batching(self) -> None:
        for other in _SCHEDULERS:
            if other in self._config:
                raise ValueError(
                    f"the configuration has {other}, auto_complete_config sets dynamic_batching"
                )
        self._config.setdefault("dynamic_batching", {})

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        unknown = sorted(tensor.keys() - set(allowed))
        missing = [key for key in _REQUIRED if key not in tensor]
        if unknown or missing:
            what = f"unknown property '{unknown[0]}'" if unknown else f"no '{missing[0]}'"
            named = f"{kind} '{tensor['name']}'" if "name" in tensor else f"an {kind}"
            raise ValueError(f"{named} of auto_complete_config has {what}")
        entries = self._config.setdefault(kind, [])
        new = {**tensor, "dims": [int(dim) for dim in tensor["dims"]]}
        for entry in entries:
            if entry["name"] == new["name"]:
                self._merge(kind, entry, new)
                return
        entries.append(new)

    def _merge(self, kind: str, entry: dict[str, Any], new: dict[str, Any]) -> None:
        """Add fields of a tensor that the file leaves open; all other fields must agree."""
        if entry.get("data_type") == "TYPE_INVALID":
            del entry["data_type"]
        if not entry.get("dims"):
            entry.pop("dims", None)
        if not entry.get("optional"):
            entry.pop("optional", None)
        for key, value in new.items():
            if entry.setdefault(key, value) != value:
                raise ValueError(
                    f"{kind} '{new['name']}' has {key} {entry[key]} in the configuration, "
                    f"{self._source} adds {value}"
                )


def auto_completed(
    complete: Callable[[AutoCompleteConfig], Any], spec: ModelSpec, directory: str, *source: str
) -> ModelSpec:
    """Return the spec after a model's `auto_complete_config`, checked like a configuration."""
    result = complete(AutoCompleteConfig(spec.config, *source))
    if not isinstance(result, AutoCompleteConfig):
        raise ConfigError(
            f"model '{spec.name}': auto_complete_config must return the configuration it got, "
            f"got {'None' if result is None else type(result).__name__}"
        )
    config = model_config.parse_dict(result.as_dict(), spec.name, spec.backend, partial=False)
    return config.spec(spec.version, read_labels(config, directory))
