"""Settings: from a file and the environment, with units, and error messages."""

from pathlib import Path

import pytest

from shmserve import config, model_places
from shmserve.errors import ConfigError
from shmserve.settings import kinds
from shmserve.settings.retired import RETIRED


def problems(environ: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as told:
        config.load(environ)
    return told.value.message.splitlines()


def in_file(folder: Path, text: str) -> dict[str, str]:
    (folder / "s.toml").write_text(text)
    return {"SHMSERVE_CONFIG": str(folder / "s.toml")}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64k", 65536),
        ("512MiB", 512 << 20),
        ("1GB", 10**9),
        ("1.5 GiB", 3 << 29),
        ("2t", 2 << 40),
    ],
)
def test_sizes_may_have_units(text: str, nbytes: int, tmp_path) -> None:
    assert config.load({"SHMSERVE_POOL_BYTES": text}).pool_bytes == kinds.size(text) == nbytes
    assert config.load(in_file(tmp_path, f'pool_bytes = "{text}"')).pool_bytes == nbytes


@pytest.mark.parametrize("text", ["1.0000001k", "3 parsecs", "-1k", "k", "2min"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert kinds.size(text) is None
    [line] = problems({"SHMSERVE_POOL_BYTES": text})
    assert line == (
        f"bad setting pool_bytes = '{text}' (SHMSERVE_POOL_BYTES in the environment): pool_bytes "
        "wants a size in bytes or with a unit (64k, 512MiB, 1GB), at least 0; its default is 0"
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2), ("500ms", 0.5), ("2min", 120), ("1h", 3600)]
)
def test_times_may_have_units(text: str, seconds: float) -> None:
    assert config.load({"SHMSERVE_HEAD_TIMEOUT_S": text}).head_timeout_s == seconds


def test_no_time_is_longer_than_clocks_can_add_up() -> None:
    for text in ("1e300", "1000000001", "inf", "nan"):
        assert problems({"SHMSERVE_REQUEST_TIMEOUT_S": text})
    assert config.load({"SHMSERVE_REQUEST_TIMEOUT_S": "1e9"}).request_timeout_s == 1e9


def test_rates_are_no_times() -> None:
    assert problems({"SHMSERVE_MIN_BYTES_PER_S": "2min"})
    assert config.load({"SHMSERVE_MIN_BYTES_PER_S": "2MiB"}).min_bytes_per_s == 2 << 20


def test_sizes_are_shown_as_they_may_be_given() -> None:
    for nbytes in (0, 1, 1000, 1024, 3 << 20, 1 << 40):
        text = kinds.size_text(nbytes)
        assert int(kinds.without_unit("x_bytes", text)) == nbytes


def test_all_that_is_wrong_is_told_with_its_place(tmp_path) -> None:
    text = (
        'model_control = "often"\n\n[http]\nworkrs = 3\nworkers = 0\n[pipelines]\none = ["a", 7]\n'
    )
    environ = in_file(tmp_path, text)
    path = environ["SHMSERVE_CONFIG"]
    told = problems({**environ, "SHMSERVE_HTP_BIND": "x", "SHMSERVE_GRPC_BIND": "unix:/x"})
    assert told[:2] == [
        f"unknown setting [http] workrs in {path}, line 4;"
        " did you mean [http] workers (http_workers)?",
        "unknown setting SHMSERVE_HTP_BIND in the environment; did you mean SHMSERVE_HTTP_BIND?",
    ]
    assert told[2] == (
        f"bad setting model_control = 'often' ({path}, line 1): "
        "model_control wants one of explicit, none, poll; its default is none"
    )
    assert told[3] == (
        f"bad setting http_workers = 0 ({path}, line 5): http_workers wants a whole number, "
        "at least 1; its default is 2"
    )
    assert told[4].startswith(f"bad setting pipelines.one[1] = 7 ({path}, line 6): pipelines ")
    assert "wants a table (in a variable name=item,item;other=item) that gives each" in told[4]
    assert len(told) == 5


def test_lists_and_tables_are_asked_for_in_sentences(tmp_path) -> None:
    environ = in_file(tmp_path, "http_bind = 8000\nmetrics_bind = [8002]\n[pipelines]\np = []\n")
    file = environ["SHMSERVE_CONFIG"]
    assert problems(environ) == [
        f"bad setting http_bind = 8000 ({file}, line 1): http_bind wants a list of texts; its"
        " default is 127.0.0.1:8000",
        f"bad setting metrics_bind[0] = 8002 ({file}, line 2): metrics_bind wants a list of items,"
        " each a TCP address HOST:PORT, with an IPv6 HOST in brackets; its default is nothing",
        f"bad setting pipelines.p = [] ({file}, line 3): pipelines wants a table (in a variable"
        " name=item,item;other=item) that gives each name a list of one or more texts; its default"
        " is nothing",
    ]


def test_no_form_of_a_value_is_a_regular_expression() -> None:
    wanted = [setting.wants for setting in config.declared().values()]
    assert [text for text in wanted if "match" in text or "^" in text or "`" in text] == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http_port", "http_bind"),
        ("grpc_host", "grpc_bind"),
        ("metrics_port", "metrics_bind"),
        ("port", "http_bind"),
    ],
)
def test_ports_and_hosts_are_addresses_here(tmp_path, given: str, meant: str) -> None:
    [line] = problems(in_file(tmp_path, f"{given} = 8080"))
    end = "? It takes addresses HOST:PORT"
    assert line.endswith(
        f"unknown setting {given} in {tmp_path}/s.toml, line 1; did you mean {meant}{end}"
    )
    variable = f"SHMSERVE_{given.upper()}"
    [line] = problems({variable: "8080"})
    there = "in the environment; did you mean SHMSERVE_"
    assert line == f"unknown setting {variable} {there}{meant.upper()}{end}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[http]\nport = 9000\n",
            "[http] port in {}, line 2; did you mean [http] bind (http_bind)?",
        ),
        ("http.port = 9000\n", "http.port in {}, line 1; did you mean [http] bind (http_bind)?"),
        ("http = {port = 9}\n", "[http] port in {}; did you mean [http] bind (http_bind)?"),
        ("[htp]\nport = 9\n[http]\nbind = []\n", "[htp] port in {}, line 2"),
        (
            "[http.tls]\ncerts = ''\n",
            "[http.tls] certs in {}, line 2; did you mean [http.tls] cert (http_tls_cert)?",
        ),
    ],
)
def test_what_stands_below_a_header_is_named_as_it_stands_there(
    tmp_path, text: str, told: str
) -> None:
    [line] = problems(in_file(tmp_path, text))
    line = line.removesuffix(" It takes addresses HOST:PORT")
    assert line.removeprefix("unknown setting ") == told.format(f"{tmp_path}/s.toml")


@pytest.mark.parametrize(
    ("text", "table", "key"),
    [
        ('[http]\nworkers = 1\npool_bytes = "1GiB"\n', "[http]", "pool_bytes"),
        ('[http.tls]\ncert = ""\nkeys_file = ""\n', "[http.tls]", "keys_file"),
        ("[pipelines]\np = ['a']\nload_models = []\n", "[pipelines]", "load_models"),
    ],
)
def test_keys_of_the_top_level_below_a_header_are_told_where_they_belong(
    tmp_path, text: str, table: str, key: str
) -> None:
    assert problems(in_file(tmp_path, text)) == [
        f"unknown setting {table} {key} in {tmp_path}/s.toml, line 3: {key} belongs to no table,"
        f" but stands below {table}; write {key} above the first line with a [table]"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nmodel_repository = /srv/m\n", "line 2 is `model_repository = /srv/m`; texts are writ"),
        ("http_workers =", "Invalid value (at end of document); line 1 is `http_workers =`; texts"),
        ("[http", "line 1 is `[http`"),
        ("workers: 4", "line 1 is `workers …`"),
        ("http_restricted_api = hush", "line 1 is `http_restricted_api …`"),
        ("htp_restricted_api = hush", "line 1 is `htp_restricted_api …`"),
        ('{"http_workers": "hush"}', "(at line 1, column 1)"),
    ],
)
def test_a_line_that_is_no_toml_is_shown_without_secrets(tmp_path, text: str, told: str) -> None:
    [line] = problems(in_file(tmp_path, text))
    assert told in line
    assert "hush" not in line


def test_the_environment_wins_and_is_what_is_named(tmp_path) -> None:
    environ = {**in_file(tmp_path, "http_workers = 0"), "SHMSERVE_HTTP_WORKERS": "5"}
    reading = config.read(environ)
    assert reading.settings.http_workers == 5
    assert reading.origins == {"http_workers": "SHMSERVE_HTTP_WORKERS in the environment"}


def test_tables_are_prefixes_however_deep(tmp_path) -> None:
    settings = config.load(in_file(tmp_path, '[http]\nworkers = 3\n[http.tls]\ncert = "x.pem"\n'))
    assert (settings.http_workers, settings.http_tls_cert) == (3, "x.pem")


def test_what_is_set_both_ways_is_refused(tmp_path) -> None:
    environ = in_file(tmp_path, "http_workers = 3\n[http]\nworkers = 3\n")
    path = environ["SHMSERVE_CONFIG"]
    assert problems(environ) == [f"http_workers is set twice: {path}, line 1, and {path}, line 3"]


def test_a_former_name_is_named_as_it_was_written() -> None:
    [line] = problems({"SHMSERVE_GRPS_PIPELINES": "x"})
    assert line.startswith("bad setting pipelines = 'x' (SHMSERVE_GRPS_PIPELINES in the environ")


def test_secrets_are_not_shown(tmp_path) -> None:
    [line] = problems(in_file(tmp_path, 'http_restricted_api = ["a:b=hush", 7]'))
    assert "hush" not in line
    assert "http_restricted_api[1] = (not shown)" in line


@pytest.mark.parametrize("text", [b"x = ", b"x = '\xff'"])
def test_a_file_that_is_no_toml_is_named(tmp_path, text: bytes) -> None:
    environ = in_file(tmp_path, "")
    (tmp_path / "s.toml").write_bytes(text)
    [line] = problems(environ)
    assert line.startswith(f"the file named by SHMSERVE_CONFIG, {tmp_path}/s.toml, is not TOML: ")


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    environ = {"SHMSERVE_CONFIG": str(tmp_path / "none.toml")}
    assert problems(environ) == [
        f"the file named by SHMSERVE_CONFIG, {tmp_path}/none.toml, cannot be read "
        "(No such file or directory)"
    ]


def test_every_default_can_be_given_as_it_is_shown() -> None:
    """Output of `shmserve settings` is valid input for a variable."""
    declared = config.declared()
    environ = {
        f"SHMSERVE_{name.upper()}": one.text(one.default)
        for name, one in declared.items()
        if one.text(one.default)
    }
    assert config.load(environ) == config.load({})


@pytest.mark.parametrize(
    "address",
    ["s3://bucket", "s3://bucket/a/b", "gs://b/m", "az://c/m", "hf://owner/name@main/models",
     "https://models.example:8443/prod/", "relative/folder", "/srv/models", "/srv/a@b?c"],
)  # fmt: skip
def test_repositories_may_be_addresses(address: str) -> None:
    assert config.load({"SHMSERVE_MODEL_REPOSITORY": address}).model_repository == (address,)


@pytest.mark.parametrize(
    "address",
    ["https://user:s3cret@models.example/prod", "https://models.example/prod?sig=s3cret",
     "ftp://models.example/prod", "s3://", "https://models.example/#s3cret"],
)  # fmt: skip
def test_addresses_have_no_secrets_and_none_is_shown(address: str) -> None:
    (line,) = problems({"SHMSERVE_MODEL_REPOSITORY": f"/srv/models,{address}"})
    assert line.startswith("bad setting model_repository[1] = ")
    assert "user:" not in line
    assert "sig=s3cret" not in line


def test_a_remote_repository_is_a_catalog_of_the_cache() -> None:
    environ = {
        "SHMSERVE_MODEL_REPOSITORY": "/srv/models,s3://bucket/a,s3://bucket/a/",
        "SHMSERVE_REPOSITORY_CACHE_DIR": "/var/cache/x",
    }
    local, one, other = model_places.repository_paths(config.load(environ))
    assert local == "/srv/models"
    assert one == other
    assert one.startswith("/var/cache/x/repositories/")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/shmserve"}, "/var/cache/shmserve"),
        ({"XDG_CACHE_HOME": "/home/u/.c"}, "/home/u/.c/shmserve"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], folder: str) -> None:
    assert model_places.cache_dir(config.Settings(), environ) == folder


def test_a_setting_that_is_no_more_is_taken_where_it_changes_nothing(tmp_path):
    file = tmp_path / "old.toml"
    file.write_text('grpc_server = "http2"\n')
    reading = config.read({"SHMSERVE_CONFIG": str(file)})
    assert reading.warnings == (
        f"grpc_server ({file}, line 1) has no effect: since 0.2 gRPC has one engine, "
        "the one that was called http2; delete the setting",
    )
    with pytest.raises(ConfigError) as caught:
        config.read({"SHMSERVE_GRPC_SERVER": "grpcio"})
    assert caught.value.message == (
        "grpc_server = 'grpcio' (SHMSERVE_GRPC_SERVER in the environment) is refused: since 0.2 "
        "gRPC has one engine, the one that was called http2; delete the setting"
    )


@pytest.mark.parametrize("given", ["65536", "64k", "64KiB", "0.0625 MiB"])
def test_values_of_retired_settings_are_compared_as_numbers(given: str, tmp_path: Path) -> None:
    reading = config.read({"SHMSERVE_MAX_SMALL_BODY_BYTES": given})
    assert reading.warnings == (
        "max_small_body_bytes (SHMSERVE_MAX_SMALL_BODY_BYTES in the environment) has no effect: "
        "since 0.2 it is always 64KiB, as no service needed another value; delete the setting",
    )
    in_toml = in_file(tmp_path, f'grpc_silence_s = "10000ms"\n[max_small]\nbody_bytes = "{given}"')
    assert len(config.read(in_toml).warnings) == 2


def test_every_retired_setting_is_taken_with_what_holds_now() -> None:
    assert not RETIRED.keys() & config.declared().keys()
    environ = {f"SHMSERVE_{name.upper()}": retired.shown(name) for name, retired in RETIRED.items()}
    assert len(config.read(environ).warnings) == len(RETIRED)
    assert environ["SHMSERVE_GRPC_SMALL_SILENCE_S"] == "0.25s", "a time has its unit"


@pytest.mark.parametrize("given", ["65537", "much", "64s", "-1"])
def test_a_refusal_tells_at_once_all_that_an_upgrade_takes_away(given: str) -> None:
    told = problems(
        {
            "SHMSERVE_MAX_EVENTS": "1000",
            "SHMSERVE_MAX_CHUNKS": given,
            "SHMSERVE_OTLP_DELAY_S": "1s",
            "SHMSERVE_HTTP_WORKERS": "0",
        }
    )
    assert [line.partition(" (")[0] for line in told] == [
        f"max_chunks = '{given}'",
        "otlp_delay_s = '1s'",
        "bad setting http_workers = '0'",
        "max_events",
    ]
    assert told[0].endswith(
        "is refused: since 0.2 it is always 65536, as no service needed another value; "
        "delete the setting"
    )
    assert "OTEL_BSP_SCHEDULE_DELAY" in told[1]


def test_the_environment_wins_for_retired_settings_too(tmp_path) -> None:
    in_toml = in_file(tmp_path, "max_events = 5")
    (warning,) = config.read({**in_toml, "SHMSERVE_MAX_EVENTS": "1000"}).warnings
    assert warning.startswith("max_events (SHMSERVE_MAX_EVENTS in the environment) has no effect")
    (tmp_path / "s.toml").write_text("max_events = 1000")
    (line,) = problems({**in_toml, "SHMSERVE_MAX_EVENTS": "5"})
    assert line.startswith("max_events = '5' (SHMSERVE_MAX_EVENTS in the environment) is refused")


def test_no_setting_is_offered_that_is_no_more(tmp_path) -> None:
    for name in ("executor_oom_score_ad", "max_metric_familie"):
        (line,) = problems({f"SHMSERVE_{name.upper()}": "1"})
        assert line == f"unknown setting SHMSERVE_{name.upper()} in the environment"
        (line,) = problems(in_file(tmp_path, f"{name} = 1"))
        assert "did you mean" not in line


def test_each_setting_has_a_section_and_a_description() -> None:
    declared = config.declared()
    assert declared["max_queue"].section == "Limits on requests"
    assert declared["grps_online"].section == "GRPS"
    assert declared["max_queue"].description.startswith(
        "requests from one frontend process that wait"
    )
