"""Fetching from real stores, with the fetcher's own code in a separate process."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.cli import main as command
from shmserve.repository import catalog
from tests.faulty_store import KEYS, SECRET, Faulty, FolderServer, Moto
from tests.running_server import ROOT, wait_until

pytestmark = pytest.mark.needs("remote")
FILES = {"config.pbtxt": b"", "1/model.py": b"one" * 1000, "1/weights": b"w" * 300_000}


class Program:
    """Process that fetches."""

    def __init__(self, log: Path, endpoint: str, **environ: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.fetch_program"],
                cwd=ROOT,
                env={**os.environ, **KEYS, "AWS_ENDPOINT_URL": endpoint, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        told = self._log.read_text()
        assert SECRET not in told
        assert "Authorization" not in told


class Fetcher:
    """A service's fetcher, in a program: from `url` into the cache `folder`."""

    def __init__(self, program: Program, url: str, folder: Path, **settings: object) -> None:
        given = {
            "model_repository": url,
            "repository_cache_dir": folder,
            "repository_silence_s": 5,
            **settings,
        }
        self._environ = {f"SHMSERVE_{name.upper()}": str(value) for name, value in given.items()}
        self.process = program.process
        self.cache = folder

    def ask(self, *names: str, keep: tuple[str, ...] = ()) -> None:
        question = {"names": names, "keep": keep, "environ": self._environ}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[dict[str, str], list[str]]:
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        return told["problems"], told["unlisted"]

    def round(self, *names: str, keep: tuple[str, ...] = ()) -> dict[str, str]:
        """Run a round and return the problems. Every model must have been listed."""
        self.ask(*(names or ("*",)), keep=keep)
        problems, unlisted = self.answer()
        assert unlisted == []
        return problems

    def catalog(self) -> catalog.Catalog:
        (path,) = (self.cache / "repositories").glob("*.catalog")
        found = catalog.read(str(path))
        assert found is not None
        return found

    def folder(self, model: str) -> Path:
        snapshot = self.catalog().models[model].snapshot
        return self.cache / "snapshots" / snapshot / model

    def files(self, model: str) -> dict[str, bytes]:
        root = self.folder(model)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def program(proxy: Faulty, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("logs") / "log", proxy.url)
    yield made
    made.end()


@pytest.fixture
def another(proxy: Faulty, tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path / "log", proxy.url)
    yield made
    made.end()


def put(moto: Moto, repository: str, model: str, files: dict[str, bytes] = FILES) -> None:
    for path, data in files.items():
        moto.put(f"models/{repository}/{model}/{path}", data)


FAULTS = {
    "truncate": ("1/weights", "1/weights"),
    "short": ("1/weights", "came with 150000 bytes of 300000"),
    "corrupt": ("1/weights", "came with another checksum than was told"),
    "longer": ("1/weights", "1/weights"),
    "refuse": ("1/weights", "the store refuses access"),
}


def test_bad_answers_replace_nothing(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    put(moto, "faults", "m", {**FILES, "1/weights": b"good" * 100})
    fetcher = Fetcher(program, "s3://models/faults", tmp_path / "cache")
    assert fetcher.round() == {}
    good = fetcher.files("m")
    put(moto, "faults", "m")
    for fault, (end, text) in FAULTS.items():
        store.faults = {end: fault}
        problems = fetcher.round()
        assert text in problems["m"], fault
        assert SECRET not in problems["m"]
        assert fetcher.files("m") == good
        assert fetcher.catalog().models["m"].problem == problems["m"]
    store.faults = {}
    store.asked.clear()
    assert fetcher.round() == {}
    assert fetcher.files("m") == FILES
    # the file comes from the earlier snapshot
    assert [p for p in store.asked if "model.py" in p] == []
    assert (fetcher.folder("m") / "1/model.py").stat().st_nlink == 2


def test_a_store_that_falls_silent_is_given_up(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    put(moto, "silent", "m")
    store.faults = {"1/weights": "stall"}
    fetcher = Fetcher(program, "s3://models/silent", tmp_path / "c", repository_silence_s=2.0)
    assert "in time" in (told := fetcher.round()["m"]) or "nothing came" in told
    store.stop()
    fetcher.ask("*")
    _, (unlisted,) = fetcher.answer()
    store.start()
    assert unlisted.startswith("s3://models/silent: the store ")
    assert fetcher.catalog().problem == unlisted


def test_killed_while_it_fetches_its_successor_goes_on(
    moto: Moto, store: Faulty, program: Program, another: Program, tmp_path: Path
) -> None:
    put(moto, "killed", "m")
    store.faults = {"1/weights": "stall"}
    settings = {"repository_transfers": 1, "repository_silence_s": 30}
    first = Fetcher(another, "s3://models/killed", tmp_path / "cache", **settings)
    first.ask("m")
    wait_until(lambda: any("weights" in path for path in store.asked), "the transfer")
    another.kill()
    assert os.listdir(first.cache / "snapshots") == []
    assert first.catalog().models["m"].snapshot == ""
    store.go_on.set()
    store.faults = {}
    store.asked.clear()
    second = Fetcher(program, "s3://models/killed", tmp_path / "cache", **settings)
    assert second.round() == {}
    assert second.files("m") == FILES
    assert [path for path in store.asked if "model.py" in path] == []


def test_services_of_a_host_fetch_once(
    moto: Moto, store: Faulty, program: Program, another: Program, tmp_path: Path
) -> None:
    put(moto, "shared", "m")
    put(moto, "shared", "other")
    started = [Fetcher(p, "s3://models/shared", tmp_path / "cache") for p in (program, another)]
    for fetcher in started:
        fetcher.ask("m")
    assert [fetcher.answer() for fetcher in started] == [({}, [])] * 2
    assert sum("m/1/weights" in path for path in store.asked) == 1
    assert started[0].files("m") == started[1].files("m") == FILES
    assert started[0].catalog().models["other"].snapshot == ""


def test_a_store_with_nothing_is_rather_a_wrong_address(
    store: Faulty, program: Program, tmp_path: Path
) -> None:
    for url, why in (
        ("s3://models/nowhere", "it lists no models"),
        ("s3://no-such-bucket/x", "it is not there"),
    ):
        fetcher = Fetcher(program, url, tmp_path / "cache")
        fetcher.ask()
        assert fetcher.answer() == ({}, [f"{url}: {why}"])


def test_versions_that_are_served_are_fetched_and_steps_with_their_ensemble(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    many = {f"{version}/model.py": b"%d" % version for version in (1, 2, 10)}
    policy = b"version_policy { latest { num_versions: 2 } }"
    put(moto, "parts", "step", {**many, "config.pbtxt": policy, "labels.txt": b"a"})
    steps = b'ensemble_scheduling { step [ { model_name: "step" } ] }'
    put(moto, "parts", "whole", {"config.pbtxt": steps, "1/": b""})
    put(moto, "parts", "unasked")
    put(moto, "parts", "mlservers", {**many, "model-settings.json": b"{}"})
    fetcher = Fetcher(program, "s3://models/parts", tmp_path / "cache")
    assert fetcher.round("mlservers") == {}
    assert set(fetcher.files("mlservers")) == {*many, "model-settings.json"}
    assert fetcher.round("whole") == {}
    assert set(fetcher.files("step")) == {"2/model.py", "10/model.py", "config.pbtxt", "labels.txt"}
    assert (fetcher.folder("whole") / "1").is_dir()
    assert not any("unasked/1" in path for path in store.asked)


def test_names_of_a_store_stay_in_the_cache(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    put(moto, "names", "good")
    put(moto, "names", "bad", {"1/a\\b": b"x"})
    fetcher = Fetcher(program, "s3://models/names", tmp_path / "cache")
    bad = "file '1/a\\b' has a character in its path that none may have"
    assert fetcher.round() == {"bad": bad}
    assert fetcher.files("good") == FILES


def test_a_model_larger_than_the_cache_is_refused(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    put(moto, "large", "m")
    limit = {"repository_cache_bytes": 100_000}
    fetcher = Fetcher(program, "s3://models/large", tmp_path / "cache", **limit)
    assert "bytes do not fit beside 0 bytes that are in use" in fetcher.round()["m"]
    assert not any("weights" in path for path in store.asked)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Faulty]:
    folder = tmp_path / "web"
    for path, data in FILES.items():
        (folder / "m" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "m" / path).write_bytes(data)
    server = FolderServer(tmp_path)
    proxy = Faulty(server.port)
    yield proxy
    proxy.stop()
    server.stop()


def test_a_web_server_has_an_index(
    web: Faulty, program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = {"repository_http_headers": f"Authorization=Bearer {SECRET}"}
    fetcher = Fetcher(program, f"{web.url}/web", tmp_path / "cache", **key)
    fetcher.ask("*")
    assert fetcher.answer() == ({}, [f"{web.url}/web: it is not there"])
    link = tmp_path / "web/m/2"
    link.symlink_to(tmp_path / "web/m/1")
    # a server must not follow the link, nor loop
    assert command(["index", str(tmp_path / "web")]) == 2
    link.unlink()
    assert command(["index", str(tmp_path / "web")]) == 0
    assert "1 models, 3 files" in capsys.readouterr().out
    assert fetcher.round() == {}
    assert fetcher.files("m") == FILES
    assert all(fields.get("Authorization") == f"Bearer {SECRET}" for fields in web.fields)
    (tmp_path / "web/m/1/model.py").write_bytes(b"two")  # and the index is outdated
    (tmp_path / "web/m/1/new").write_bytes(b"new")
    assert fetcher.round() == {}
    command(["index", str(tmp_path / "web")])
    for fault in ("corrupt", "truncate", "longer", "short"):
        web.faults = {"1/model.py": fault}
        assert "1/model.py" in fetcher.round()["m"]
        assert fetcher.files("m") == FILES
    web.faults = {}
    assert fetcher.round() == {}
    assert fetcher.files("m") == {**FILES, "1/model.py": b"two", "1/new": b"new"}


def test_header_fields_stay_at_the_configured_origin(
    web: Faulty, program: Program, tmp_path: Path
) -> None:
    assert command(["index", str(tmp_path / "web")]) == 0
    elsewhere = Faulty(web.upstream)
    try:
        secret = {"repository_http_headers": f"X-Api-Key={SECRET},Authorization=Bearer {SECRET}"}
        fetcher = Fetcher(program, f"{web.url}/web", tmp_path / "cache", **secret)
        web.faults = {"index.json": elsewhere.url, "1/weights": elsewhere.url}
        assert fetcher.round() == {}
        assert fetcher.files("m") == FILES
        assert {path.rpartition("/")[2] for path in elsewhere.asked} == {"index.json", "weights"}
        assert SECRET not in str(elsewhere.fields)
        assert [fields.get("X-Api-Key") for fields in web.fields] == [SECRET] * len(web.fields)
        (tmp_path / "web/m/1/weights").write_bytes(b"new")
        command(["index", str(tmp_path / "web")])
        elsewhere.faults = {"1/weights": "refuse"}
        assert fetcher.round() == {
            "m": "file '1/weights': the store answers with status 403 after a redirect"
        }
    finally:
        elsewhere.stop()


def test_an_index_without_models_or_files_changes_nothing(
    web: Faulty, program: Program, tmp_path: Path
) -> None:
    index = tmp_path / "web/index.json"
    fetcher = Fetcher(program, f"{web.url}/web", tmp_path / "cache")
    assert command(["index", str(index.parent)]) == 0
    assert fetcher.round() == {}
    index.write_text('{"version": 1, "models": {}}')
    fetcher.ask("*")
    problem = f"{web.url}/web: it lists no models"
    assert fetcher.answer() == ({"m": problem}, [problem])
    assert fetcher.files("m") == FILES
    index.write_text('{"version": 1, "models": {"m": {}}}')
    assert fetcher.round() == {"m": "it has no files"}
    assert fetcher.files("m") == FILES


def test_rounds_run_side_by_side(
    moto: Moto, store: Faulty, program: Program, tmp_path: Path
) -> None:
    for model in ("a", "b"):
        put(moto, "beside", model)
    store.faults = {"a/1/weights": "stall"}
    fetcher = Fetcher(program, "s3://models/beside", tmp_path / "cache", repository_silence_s=30)
    fetcher.ask("a")
    wait_until(lambda: any("a/1/weights" in path for path in store.asked), "the transfer")
    assert fetcher.round("b") == {}
    threading.Timer(0.0, store.go_on.set).start()
    assert fetcher.answer() == ({}, [])
