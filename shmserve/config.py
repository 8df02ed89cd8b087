"""Settings: one frozen Struct, read once from a TOML file and the environment.

`SHMSERVE_CONFIG` names the file. Every key ``a_b`` is also the environment variable
``SHMSERVE_A_B``, which wins. A table is a prefix: ``[client_shm] mode`` is ``client_shm_mode``.
Unknown keys are errors. No other module reads settings from the environment. Sizes (``…_bytes``)
and times (``…_s``) may have units; docs/settings.md has every setting.

Extensions have settings of their own: the key ``x_a_b`` is `a_b` of the extension ``x``.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.setting_sources import Declared, Sources
from shmserve.settings.retired import FORMER, RETIRED
from shmserve.settings.telemetry import TelemetrySettings

PREFIX = "SHMSERVE_"
CONFIG_VARIABLE = "SHMSERVE_CONFIG"
# Set by a reload for its processes: name of their folder in the run directory (`run_dir`)
GENERATION_VARIABLE = "SHMSERVE_GENERATION"
GENERATION = re.compile(r"g[1-9][0-9]*")
COMMAND_VARIABLE = "SHMSERVE_COMMAND"  # command line of `shmserve serve`, for a reload
KEY_VARIABLE = "SHMSERVE_KEY"  # key that `shmserve.client` and commands send
_NOT_SETTINGS = {CONFIG_VARIABLE, GENERATION_VARIABLE, COMMAND_VARIABLE, KEY_VARIABLE}


class ExtensionSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of an extension's settings. A subclass, whose fields all have defaults, is an
    extension of the group `extensions.SETTINGS`. The extension's name is the prefix of its
    settings.

    Every process reads the settings, and gunicorn's master among them must stay small. So the
    module of a subclass imports only this module.

    Attributes:
        FLAGS: names of boolean fields that clients may change while the service runs. The
            registry, which all processes see, has their current values by the settings' full names
            (`core.registry.Snapshot.flags`). The message `SetFlag` changes a flag.
    """

    FLAGS: ClassVar[tuple[str, ...]] = ()


Own = TypeVar("Own", bound=ExtensionSettings)


class Settings(TelemetrySettings, frozen=True):
    """Every setting with its default. Sizes are bytes, times are seconds.

    A section of the reference is a class. Each section extends the previous section, because
    msgspec allows a Struct only one base.
    """

    extensions: dict[str, Any] = field(default_factory=dict)  # not a key: for `extension`, by name

    def extension(self, name: str, kind: type[Own]) -> Own:
        """Return the settings of an extension, which are of this `kind`."""
        own = self.extensions.get(name)
        return own if isinstance(own, kind) else kind()

    @property
    def exports(self) -> bool:
        """Return whether traces or metrics are exported to an OpenTelemetry collector."""
        return self.trace_mode == "opentelemetry" or self.otlp_metrics_interval_s > 0

    @property
    def master_silence_s(self) -> float:
        """Return the longest silence, in seconds, of a healthy gunicorn master, which is silent
        while it stops workers."""
        return self.watchdog_s + self.drain_timeout_s

    def flags(self) -> dict[str, bool]:
        """Return flags of extensions with their first values, by the settings' full names."""
        return {
            f"{name}_{flag}": getattr(own, flag)
            for name, own in self.extensions.items()
            for flag in own.FLAGS
        }


# items of these settings contain commas
_SEMICOLONS = {"http_restricted_api", "grpc_restricted_protocol"}
SECRET = _SEMICOLONS | {"otlp_headers", "repository_http_headers"}  # values never shown


class Reading(NamedTuple):
    """Settings, origins of the given ones, and warnings about settings to be deleted."""

    settings: Settings
    origins: dict[str, str]
    warnings: tuple[str, ...]


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings. Raises as `read`."""
    return read(environ).settings


def read(environ: Mapping[str, str] = os.environ) -> Reading:
    """Read the settings and their origins. Raise ConfigError for a file that cannot be read, for
    unknown keys and values of the wrong type: a line for each error, then the warnings."""
    extensions.check()
    known = declared()
    source = Sources(known, FORMER, RETIRED)
    if path := environ.get(CONFIG_VARIABLE, ""):
        source.take_file(path, CONFIG_VARIABLE)
    source.take_variables(
        {name: text for name, text in environ.items() if name not in _NOT_SETTINGS}, PREFIX
    )
    values = source.converted()
    problems = source.problems
    if not problems:
        settings = Settings(
            **{key: values[key] for key in Settings.__struct_fields__ if key in values}
        )
        problems = _wrong_binds(settings) + _wrong_traces(settings)
    if problems:
        raise ConfigError("\n".join([*problems, *source.warnings]))
    own = {
        name: kind(
            **{f: values.pop(k) for f in kind.__struct_fields__ if (k := f"{name}_{f}") in values}
        )
        for name, kind in extensions.load_all(extensions.SETTINGS).items()
    }
    origins = {name: given.origin for name, given in source.given.items()}
    return Reading(Settings(**values, extensions=own), origins, tuple(source.warnings))


def declared() -> dict[str, Declared]:
    """Return all settings by name: the server's own, then those of extensions."""
    settings = _fields("", Settings)
    del settings["extensions"]
    for name, kind in extensions.load_all(extensions.SETTINGS).items():
        settings |= _fields(f"{name}_", kind)
    return settings


def _fields(prefix: str, kind: type[Struct]) -> dict[str, Declared]:
    sections: dict[str, str] = {}  # title of the class that has added the field
    parts = [part for part in kind.__mro__ if issubclass(part, Struct) and part is not Struct]
    for part in reversed(parts):
        for field_name in part.__struct_fields__:
            ours = part.__module__.startswith("shmserve.")
            sections.setdefault(field_name, (part.__doc__ or "") if ours else "")
    settings = {}
    for declared_field in msgspec.structs.fields(kind):
        name = prefix + declared_field.name
        factory = declared_field.default_factory
        default = declared_field.default if factory is msgspec.NODEFAULT else factory()
        separator = ";" if name in _SEMICOLONS else ","
        section = sections[declared_field.name]
        settings[name] = Declared(
            name, declared_field.type, default, separator, name in SECRET, section
        )
    return settings


def _wrong_binds(settings: Settings) -> list[str]:
    binds = settings.http_bind + settings.grpc_bind + settings.metrics_bind
    wrong = [
        f"remote_binds: '{bind}' is no address of http_bind, grpc_bind or metrics_bind"
        for bind in settings.remote_binds
        if bind not in binds or bind.startswith("fd://")
    ]
    wrong += _shared_ports("metrics_bind", settings.metrics_bind, "http_bind", settings.http_bind)
    for name in ("http_bind", "grpc_bind", "metrics_bind"):
        wrong += _shared_ports("agent_bind", settings.agent_bind, name, getattr(settings, name))
    if settings.metrics_bind and not settings.metrics:
        wrong.append("metrics_bind: there are no metrics (setting metrics)")
    wrong += [
        f"{name}: needs metrics_bind"
        for name in ("metrics_tls", "metrics_keys")
        if not getattr(settings, name) and not settings.metrics_bind
    ]
    return wrong


def _shared_ports(
    name: str, binds: tuple[str, ...], other: str, others: tuple[str, ...]
) -> list[str]:
    ports = {bind.rpartition(":")[2] for bind in others}
    return [
        f"{name}: '{bind}' has a port of {other}, and needs its own"
        for bind in binds
        if bind.rpartition(":")[2] in ports
    ]


def _wrong_traces(settings: Settings) -> list[str]:
    wrong = []
    tensors = "TENSORS" in settings.trace_level
    if "OFF" in settings.trace_level and len(set(settings.trace_level)) > 1:
        wrong.append("trace_level: OFF cannot be together with other levels")
    if settings.trace_log_frequency and not settings.trace_file:
        wrong.append("trace_log_frequency: there is no trace_file")
    if settings.trace_mode == "opentelemetry":
        if tensors:
            wrong.append("trace_level: TENSORS are not traced with trace_mode opentelemetry")
        if settings.trace_file:
            wrong.append("trace_file: trace_mode opentelemetry writes none")
    else:
        if tensors and not settings.trace_file:
            wrong.append("trace_level: TENSORS go to a trace_file, and there is none")
        if not settings.trace_rate:
            wrong.append("trace_rate: 0 is for trace_mode opentelemetry")
    return wrong


def state_dir(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of files that outlive the service: as set, systemd's, or `base_dir`."""
    found = folder(environ, settings.state_dir, "STATE_DIRECTORY")
    return found or base_dir(settings, environ)


def run_dir(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return this generation's run directory: `base_dir`, or after a reload a folder in it."""
    generation = environ.get(GENERATION_VARIABLE, "")
    base = base_dir(settings, environ)
    return os.path.join(base, generation) if generation else base


def base_dir(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the service's run directory: as set, systemd's, the user's, or one below /tmp."""
    found = folder(environ, settings.run_dir, "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")
    return found or f"/tmp/shmserve-{os.getuid()}"


def folder(environ: Mapping[str, str], given: str, systemd: str, user: str = "") -> str:
    """Return the folder that a setting gives, or else a variable of systemd's, or a folder of ours
    below that of a user's variable. Return "" if none is set."""
    if given:
        return os.path.abspath(given)
    if environ.get(systemd):
        return environ[systemd].split(":")[0]
    return os.path.join(environ[user], "shmserve") if environ.get(user) else ""
