"""cluster.toml: settings, and error messages."""

from pathlib import Path

import msgspec
import pytest

from shmserve import cli
from shmserve.cluster import cluster_file, haproxy_config
from shmserve.cluster.cluster_file import ClusterSettings
from shmserve.errors import ConfigError

ROOT = Path(__file__).parents[3]
GOOD = """
ray_address = "127.0.0.1:6379"
[service]
model_repository = ["/srv/models"]
http_port = 0
[haproxy]
sockets = ["/run/haproxy/admin.sock"]
[models.digits]
memory_bytes = "2GiB"
replicas = 2
max_replicas = 8
queue_s = "20ms"
[models."up.scale-2"]
memory_bytes = 1000
"""


def written(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as told:
        cluster_file.read(written(folder, text))
    return [line.replace(str(folder), "") for line in told.value.message.splitlines()]


def test_it_is_read_with_units(tmp_path) -> None:
    file = cluster_file.read(written(tmp_path, GOOD))
    rule = file.rules()["digits"]
    assert (rule.memory, rule.scaling.least, rule.scaling.most) == (2 << 30, 2, 8)
    assert rule.scaling.queue_s == 0.02
    assert file.rules()["up.scale-2"].scaling.most == 1
    assert file.settings.service_http_port == 0


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            'memory_bytes = "2GiB"',
            'memory_bytes = "2 parsecs"',
            "bad setting models_digits_memory_bytes = '2 parsecs' (/cluster.toml, line 9): "
            "models_digits_memory_bytes wants a size in bytes or with a unit (64k, 512MiB, 1GB), at"
            " least 1; its default is nothing",
        ),
        (
            "max_replicas",
            "max_replica",
            "unknown setting [models.digits] max_replica in /cluster.toml, line 11; "
            "did you mean [models.digits] max_replicas (models_digits_max_replicas)?",
        ),
        (
            "[service]",
            "[servce]",
            "unknown setting [servce] http_port in /cluster.toml, line 5; "
            "did you mean service_http_port?",
        ),
        (
            "memory_bytes = 1000",
            "",
            "models_up.scale-2_memory_bytes is missing in /cluster.toml: it wants a size in bytes "
            "or with a unit (64k, 512MiB, 1GB), at least 1",
        ),
        (
            "max_replicas = 8",
            "max_replicas = 99",
            "haproxy_slots = 32: is less than the 99 replicas that digits may have",
        ),
        (
            '"up.scale-2"',
            '"up scale"',
            "models: 'up scale' is no name: letters, digits, '_', '.' and '-'",
        ),
        (
            "/run/haproxy/admin.sock",
            "10.0.0.1",
            "bad setting haproxy_sockets[0] = '10.0.0.1' (/cluster.toml, line 7): "
            "haproxy_sockets wants a list of items, each an absolute path or HOST:PORT; its default"
            " is nothing",
        ),
        (
            '"up.scale-2"',
            "digits_max",
            "models: models_digits_max_replicas in /cluster.toml could belong to digits_max or to "
            "another model",
        ),
        (
            'model_repository = ["/srv/models"]',
            "",
            "service_model_repository is missing in /cluster.toml: it wants folders",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, before: str, after: str, told: str) -> None:
    assert before in GOOD
    assert told in problems(tmp_path, GOOD.replace(before, after))


def test_all_that_is_wrong_is_told_at_once(tmp_path) -> None:
    assert len(problems(tmp_path, GOOD.replace("2GiB", "x").replace("20ms", "y"))) == 2


def test_a_file_that_is_none(tmp_path, capsys) -> None:
    assert cli.main(["cluster", "up", str(tmp_path / "none.toml")]) == 2
    assert "the file named by the command, " in capsys.readouterr().err
    [line] = problems(tmp_path, "[models")
    assert "is not TOML" in line
    assert "models: there are none" in problems(tmp_path, "")[0]


def test_the_one_in_the_document_is_read_and_has_the_defaults_it_says(tmp_path) -> None:
    text = (ROOT / "docs/cluster.md").read_text().split("```toml\n")[1].split("```")[0]
    file = cluster_file.read(written(tmp_path, text))
    assert file.models.keys() == {"resnet"}
    shown = msgspec.structs.asdict(file.settings)
    for name, default in msgspec.structs.asdict(ClusterSettings()).items():
        given = name in ("service_model_repository", "service_config", "haproxy_sockets")
        assert given or shown[name] == default, name


def test_the_balancers_configuration_has_a_backend_for_each_model(tmp_path) -> None:
    text = haproxy_config.text(cluster_file.read(written(tmp_path, GOOD)))
    for door in ("http", "grpc"):
        assert f"backend {door}_model_digits\n" in text
        assert f"backend {door}_model_up.scale-2\n" in text
        assert f"backend {door}_nodes\n" in text
    assert text.count("server-template s 1-32 ") == 6
    assert "stats socket /run/haproxy/admin.sock group haproxy mode 660 level admin\n" in text


def test_the_balancers_socket_may_be_an_address(tmp_path) -> None:
    text = GOOD.replace("/run/haproxy/admin.sock", "[::1]:9")
    made = haproxy_config.text(cluster_file.read(written(tmp_path, text)))
    assert "stats socket [::1]:9 level admin\n" in made


def test_a_model_may_be_called_as_the_backend_of_all_nodes(tmp_path) -> None:
    text = haproxy_config.text(
        cluster_file.read(written(tmp_path, GOOD.replace("digits", "nodes")))
    )
    for name in ("http_nodes", "http_model_nodes"):
        assert text.count(f"\nbackend {name}\n") == 1
