"""Command ``shmserve settings``: prints settings in effect and where each is from; with
--markdown, docs/settings.md.
"""

import argparse
from collections.abc import Iterator
from itertools import groupby

import msgspec

from shmserve import config
from shmserve.cli.operating.show import Row, table
from shmserve.errors import ConfigError
from shmserve.setting_sources import Declared, near_name
from shmserve.settings.retired import RETIRED

_HEAD = """# Settings

<!-- Written by `make docs` (`shmserve settings --markdown`): change shmserve/settings/ instead. -->

After this page you can set everything that a server lets you set. Set a key of the TOML file that
`SHMSERVE_CONFIG` names, or an environment variable, which wins: `http_bind` is
`SHMSERVE_HTTP_BIND`.

- `shmserve settings` shows the settings in effect and their sources, never secrets.
- `shmserve settings NAME` explains a setting.
- `shmserve check` names every error at once, with its place, the given value and allowed values. A
  server with a wrong or unknown setting does not start.

An example of a file:

    model_repository = ["/srv/models"]
    pool_bytes = "8GiB"
    [http]
    bind = ["0.0.0.0:8000", "unix:/run/shmserve/http.sock"]
    workers = 4
    [pipelines]
    pipe = ["preprocess", "classify"]

- A table is a prefix: `[http] bind` is `http_bind`, `[http.tls] cert` is `http_tls_cert`. A setting
  in both forms is an error. Settings without a table stand above the first table. `pipelines` and
  `host_policies` are tables themselves, with an entry per name.
- Sizes (`…_bytes`) are bytes, or texts with a unit: `k`, `M`, `G`, `T` and `KiB`, `MiB`, `GiB`,
  `TiB` are powers of 1024, `kB`, `MB`, `GB`, `TB` of 1000; capitals do not matter.
- Times (`…_s`) are seconds, or texts with a unit: `ms`, `s`, `min`, `h`, `d`.
- In a variable, `,` separates the items of a list (in `…_restricted_…` `;`), and a table is
  `name=item,item;other=item`.
- Relative paths begin in the directory in which the server was started.
"""
_GONE = """## Settings that are gone

Until 0.4 a server with one of these settings warns and starts if the value is the present one in
this table, and does not start with any other value. `shmserve check` lists all of them at once.
"""


def main(arguments: argparse.Namespace) -> int:
    """Print, and return the exit status.

    Raises:
        ConfigError: as `config.load`, or a requested setting does not exist.
    """
    if arguments.names:
        print("\n\n".join(explained(name) for name in arguments.names))
    elif arguments.markdown:
        print(markdown(), end="")
    else:
        rows = current()
        print(msgspec.json.encode(rows).decode() if arguments.json else table(rows))
    return 0


def current() -> list[Row]:
    """Return each setting with the value in effect and where the value is from."""
    settings, origins, _ = config.read()
    extension_values = {
        f"{name}_{field}": value
        for name, extension in settings.extensions.items()
        for field, value in msgspec.structs.asdict(extension).items()
    }
    return [
        {
            "setting": name,
            "value": declared.text(
                extension_values[name] if name in extension_values else getattr(settings, name)
            ),
            "from": origins.get(name, "default"),
        }
        for name, declared in config.declared().items()
    ]


def explained(name: str) -> str:
    """Explain a setting, current or retired. Raise ConfigError if the setting does not exist."""
    if name in RETIRED:
        return f"{name}\n  {RETIRED[name].explanation(name)}"
    setting = config.declared().get(name)
    if setting is None:
        near = near_name(name, list(config.declared()))
        raise ConfigError(f"there is no setting {name}{near or ': `shmserve settings` shows all'}")
    default = setting.text(setting.default) or "nothing"
    return f"{name}\n  {setting.description}\n  takes {setting.wants}; default: {default}"


def markdown() -> str:
    """Return the reference of shmserve's settings, without settings of installed extensions."""
    return "\n".join([_HEAD, *_lines(config.declared()), *_gone()])


def _lines(declared: dict[str, Declared]) -> Iterator[str]:
    sections = groupby(declared.values(), lambda setting: setting.section)
    for section, settings in sections:
        if not section:
            continue
        yield f"## {section}\n"
        yield "| setting | default | takes | what it does |"
        yield "|---|---|---|---|"
        for setting in settings:
            takes = setting.wants.replace("|", "\\|")
            default = setting.text(setting.default).replace("|", "\\|")
            shown = f"`{default}`" if default else ""
            yield f"| `{setting.name}` | {shown} | {takes} | {setting.description} |"
        yield ""


def _gone() -> Iterator[str]:
    yield _GONE
    yield "| since | setting | present value | why, and what to do |"
    yield "|---|---|---|---|"
    for name, retired in sorted(RETIRED.items()):
        yield f"| {retired.since} | `{name}` | `{retired.shown(name)}` | {retired.advice(name)} |"
    yield ""
