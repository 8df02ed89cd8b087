"""Servers for the tests, and the leak probe after each server."""

import gc
import logging
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from shmserve.observe import logs
from tests.model_files import Make, model_maker
from tests.needs import NEEDS
from tests.running_server import STARTED, remove_folders, segments_left
from tests.servers import Server, only

HERE = Path(__file__).parent

# The same examples in each run; `--hypothesis-profile=random` draws others. A slow example is a
# busy machine's: no test asserts a maximum time.
for profile in ("same", "random"):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        derandomize=profile == "same",
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-cuda", action="store_true", help="use the machine's CUDA devices, not the fake"
    )
    parser.addoption(
        "--require",
        default="",
        metavar="NEED,NEED",
        help=f"fail tests that want one of these, where it is missing: {', '.join(NEEDS)}",
    )


def required(config: pytest.Config) -> set[str]:
    """Return the names in ``--require``."""
    return {name.strip() for name in config.getoption("--require").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    if unknown := required(config) - NEEDS.keys():
        raise pytest.UsageError(f"--require: nothing is called {', '.join(sorted(unknown))}")


def pytest_collection_finish() -> None:
    """Exempt what collection has made, a million objects, from garbage collections of the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check needs before any fixture runs, because fixtures may have the same needs."""
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if NEEDS[name].met():
                continue
            missing = f"{name} is missing: {NEEDS[name].get}"
            if name in required(item.config):
                pytest.fail(missing, pytrace=False)
            pytest.skip(f"not run, {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the servers' logs to a failure's report, because the log files are deleted."""
    report = yield
    if report.failed:
        report.sections += [
            (f"log of {s.run_dir}", s.log()[-4000:]) for s in STARTED if s.log_path.exists()
        ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Give temporary files of the session and its servers a folder, and check that ours are gone
    at the end.

    Files of pytest's fixtures are elsewhere, and pytest keeps the last for inspection. Files left
    by libraries (onnxruntime leaves some) have other names.
    """
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o755)  # tests are other users, too
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        remove_folders()
        left = [name for name in os.listdir(folder) if name.startswith(("shmserve", "tmp"))]
        left += _left_in_memory()
    # a failure's traceback keeps objects that would have closed files
    if not request.session.testsfailed:
        assert left == []


def _left_in_memory() -> list[str]:
    """Return names in /dev/shm of this session's servers, and names with this session's pid."""
    own = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name.split("-")]
    return segments_left() + own


@pytest.fixture(autouse=True)
def _log_settings_end_with_the_test() -> Iterator[None]:
    """Restore log settings, which a message on a link in the test's own process may have
    changed."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in root.handlers:
        handler.removeFilter(logs._filter)
        handler.removeFilter(logs.limit)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Server with the shipped workers, shared by tests that do not damage it."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[Server]:
    """A server with the models of the recorded cases, which are of a host without GPUs."""
    repository = HERE / "repositories" / "conformance"
    with Server(repository, {"CUDA_VISIBLE_DEVICES": ""}, **only("*"), http_workers=2) as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of the test's own, to be treated badly; must leave nothing all the same."""
    with Server(HERE / "repositories" / "basic", grpc_processes=0) as running:
        yield running


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Maker of folders of models."""
    return model_maker(tmp_path)
