"""Forwarded metadata: metadata of calls that become request parameters."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip.forwarded_fields import compiled, forwarded
from shmserve.protocol.control.data_messages import Parameter


class ForwardedMetadata:
    """Forwards metadata that match `grpc_header_forward_pattern`; false if nothing is
    forwarded."""

    def __init__(self, settings: Settings, access: CallAccess) -> None:
        self._pattern = compiled(settings.grpc_header_forward_pattern)
        self._access = access

    def __bool__(self) -> bool:
        return self._pattern is not None

    def onto(self, parameters: dict[str, Parameter], context: RpcContext) -> dict[str, Parameter]:
        """Return the parameters with the matching text metadata of a call added. Metadata replace
        parameters of the same name.

        Raises:
            InvalidArgument: as `forwarded`.
        """
        assert self._pattern is not None
        hidden = self._access.key_field(context)
        metadata = context.invocation_metadata()
        fields = ((k, v) for k, v in metadata if isinstance(v, str) and k != hidden)
        return {**parameters, **forwarded(self._pattern, fields)}
