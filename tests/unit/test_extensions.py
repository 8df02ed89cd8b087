"""The table of extensions: built-in extensions, and extensions of other distributions."""

import subprocess
import sys
from importlib import metadata

import pytest

from shmserve import config, extensions
from shmserve.config import ExtensionSettings
from shmserve.errors import ConfigError


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Entry points of a distribution, as (name, target) of one group."""
    caches = (extensions.names, extensions.load, extensions._installed)

    def entries(group: str, *points: tuple[str, str]) -> None:
        lines = "".join(f"{name} = {target}\n" for name, target in points)
        about = tmp_path / "other-1.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        monkeypatch.syspath_prepend(str(tmp_path))
        for cache in caches:
            cache.cache_clear()

    yield entries
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("group", extensions._OURS)
def test_what_the_server_brings_is_there(group: str) -> None:
    assert extensions.load_all(group).keys() >= extensions._OURS[group].keys()


def test_ours_need_no_entry_points() -> None:
    """So the server runs from a source tree, whatever metadata is installed."""
    points = [point for group in extensions._OURS for point in metadata.entry_points(group=group)]
    assert not [point for point in points if point.value.startswith("shmserve.")]


def test_an_extension_is_found_by_its_name(install: object) -> None:
    install(extensions.BACKENDS, ("ours_too", "collections:OrderedDict.fromkeys"))  # type: ignore[operator]
    assert list(extensions.names(extensions.BACKENDS))[-1] == "ours_too"
    assert extensions.load(extensions.BACKENDS, "ours_too")("a") == {"a": None}
    with pytest.raises(ConfigError, match=r"there is no extension 'theirs' of"):
        extensions.load(extensions.BACKENDS, "theirs")


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([("grps", "other:thing")], "'grps' of shmserve.backends is there twice"),
        ([("Other-Thing", "other:thing")], "'Other-Thing' of shmserve.backends: not a name"),
    ],
)
def test_a_name_that_cannot_be_used_stops_the_start(install: object, points, why) -> None:
    install(extensions.BACKENDS, *points)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=why):
        config.load({})


@pytest.mark.parametrize("target", ["no_such_module:x", "collections:no_such_thing"])
def test_what_cannot_be_imported_is_told_without_paths(install: object, target, caplog) -> None:
    install(extensions.BACKENDS, ("bad", target))  # type: ignore[operator]
    with pytest.raises(ConfigError) as told:
        extensions.load(extensions.BACKENDS, "bad")
    assert told.value.message == (
        "extension 'bad' of shmserve.backends cannot be imported (see the log)"
    )
    assert "no_such" in caplog.text


class OtherSettings(ExtensionSettings, frozen=True):
    FLAGS = ("open",)

    open: bool = False
    limit: int = 3
    names: tuple[str, ...] = ()


def test_settings_of_an_extension(install: object, tmp_path) -> None:
    install(extensions.SETTINGS, ("other", f"{__name__}:OtherSettings"))  # type: ignore[operator]
    file = tmp_path / "settings.toml"
    file.write_text("[other]\nlimit = 5\nopen = true\n[grps]\nonline = true\n")
    environ = {"SHMSERVE_CONFIG": str(file), "SHMSERVE_OTHER_NAMES": "a, b"}
    settings = config.load(environ)
    own = settings.extension("other", OtherSettings)
    assert own == OtherSettings(open=True, limit=5, names=("a", "b"))
    assert settings.flags() == {"grps_online": True, "other_open": True}
    for variable, why in (
        ("SHMSERVE_OTHER_LIMIT", "bad setting other_limit = 'many'.*a whole number"),
        ("SHMSERVE_OTHER_LEAST", "unknown setting SHMSERVE_OTHER_LEAST"),
        ("SHMSERVE_EXTENSIONS", "unknown setting"),
    ):
        with pytest.raises(ConfigError, match=why):
            config.load({variable: "many"})


def test_settings_are_read_without_numpy() -> None:
    """The HTTP workers' parent reads the settings, and must stay small and without threads."""
    code = (
        "import sys, shmserve.supervisor.service\n"
        "from shmserve import config\n"
        "config.load({})\n"
        "assert 'shmserve.grps.settings' in sys.modules\n"
        "assert 'numpy' not in sys.modules and 'grpc' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
