"""The model cache under any order of changes, fetches, failures, deaths, and starts and ends of
services.

Every snapshot that the cache names is whole and was in the store once. The cache is bounded, and
no service loses a snapshot in use.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.fetcher.cache import FILES, Cache
from shmserve.fetcher.remote_files import RemoteFile, RemoteModel
from shmserve.fetcher.rounds import Rounds
from shmserve.model_places import repository_paths
from shmserve.repository import catalog

MOST = 3200
URL = "s3://bucket/models"
MODELS = st.sampled_from(["a", "parts", "files.json"])
PATHS = st.sampled_from(["config.pbtxt", "1/model.py", "1/weights", "2/weights", "2/"])
CONTENTS = st.sampled_from([b"", b"x" * 300, b"y" * 900, b"z" * 1000])


class Killed(BaseException):
    """Death of the fetcher at any point."""


class Remote:
    """Store in memory. `fault`: failure of the transfer after `after` good transfers."""

    url = URL

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.reachable, self.fault, self.after = True, None, 0
        self.history: set[tuple] = set()

    def models(self):
        if not self.reachable:
            raise Unavailable(f"{URL}: the store cannot be reached")
        return {name: self.model(name) for name in self.files}

    def model(self, name):
        listed = [
            RemoteFile(path, len(data), "" if path.endswith("/") else mark(data), path)
            for path, data in self.files[name].items()
        ]
        return RemoteModel(name, tuple(listed))

    def fetch(self, file, path, until):
        name = Path(path).parents[1].name
        data = next(
            data
            for files in self.files.values()
            for data in files.values()
            if (len(data), mark(data)) == (file.size, file.mark)
        )
        assert name
        self.after -= 1
        if self.fault and self.after < 0:
            Path(path).write_bytes(data[: len(data) // 2])
            raise self.fault
        Path(path).write_bytes(data)


def mark(data):
    return f"md5:{hashlib.md5(data).hexdigest()}"


class Service:
    """Service that shares the cache. `running`: snapshots that executors run from."""

    def __init__(self, folder, number, remote):
        self.settings = Settings(
            model_repository=(URL,),
            repository_cache_dir=folder,
            repository_cache_bytes=MOST,
            repository_transfers=1,
        )
        self.cache = Cache(folder, MOST, f"fetcher-{number}")
        self.rounds = Rounds(self.settings, self.cache, lambda url: remote)
        self.running: dict[str, str] = {}


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.remote = Remote()
        self.numbers = iter(range(10**6))
        self.services = [self.service(), self.service()]

    @initialize(crowded=st.booleans())
    def begin(self, crowded):
        """If `crowded`, the loaded models leave no room for a third model."""
        for model in ("a", "b", "c") if crowded else ():
            self.put(model, "1/weights", b"w" * 1000)
        for model in ("a", "b") if crowded else ():
            self.load(0, model)

    def service(self):
        return Service(self.folder, next(self.numbers), self.remote)

    def teardown(self):
        for service in self.services:
            service.cache.close()
        shutil.rmtree(self.folder)

    @rule(model=MODELS, path=PATHS, data=CONTENTS)
    def put(self, model, path, data):
        files = self.remote.files.setdefault(model, {})
        files[path] = b"" if path.endswith("/") or path == "config.pbtxt" else data
        if path != "2/" and "2/weights" in files:
            files.pop("2/", None)
        if path == "2/" and "2/weights" in files:
            del files["2/"]
        self.remember(model)

    @rule(model=MODELS, path=PATHS)
    def delete(self, model, path):
        self.remote.files.get(model, {}).pop(path, None)
        if model in self.remote.files and not self.remote.files[model]:
            del self.remote.files[model]
        elif model in self.remote.files:
            self.remember(model)

    def remember(self, model):
        self.remote.history.add((model, frozenset(self.remote.files[model].items())))

    @rule(reachable=st.booleans())
    def reach(self, reachable):
        self.remote.reachable = reachable

    @rule(
        who=st.integers(0, 1),
        names=st.lists(MODELS | st.just("*"), min_size=1, max_size=2),
        fault=st.sampled_from(
            [None, None, Unavailable("spoilt"), OSError(28, "no space"), Killed()]
        ),
        after=st.integers(0, 3),
    )
    def fetch(self, who, names, fault, after):
        service = self.services[who]
        self.remote.fault, self.remote.after = fault, after
        try:
            done = service.rounds.run(names, service.running.values())
        except Killed:
            self.die(who)
            return
        finally:
            self.remote.fault = None
        entries = self.catalog(service).models
        for name in self.remote.files if self.remote.reachable else ():
            if "*" in names or name in names:
                assert (name in done.problems) == (entries[name].problem != "")
                if name not in done.problems:
                    digest = self.remote.model(name).digest(URL)
                    assert entries[name].snapshot == digest

    @rule(who=st.integers(0, 1), model=MODELS)
    def load(self, who, model):
        """The coordinator reads the catalog, right after a round, and starts executors."""
        service = self.services[who]
        service.rounds.run([model], service.running.values())
        entry = self.catalog(service).models.get(model)
        if entry is not None and service.cache.snapshot(entry.snapshot):
            service.running[model] = entry.snapshot

    @rule(who=st.integers(0, 1), model=MODELS)
    def unload(self, who, model):
        self.services[who].running.pop(model, None)

    @rule(who=st.integers(0, 1))
    def die(self, who):
        """Replace a service's fetcher. The executors go on."""
        old = self.services[who]
        old.cache.close()
        self.services[who] = self.service()
        self.services[who].running = old.running
        self.services[who].rounds.run([], old.running.values())

    @rule(who=st.integers(0, 1))
    def end(self, who):
        """End a whole service, and let its lease expire."""
        self.services[who].cache.close()
        self.services[who] = self.service()
        for lease in Path(self.folder, "leases").iterdir():
            os.utime(lease, times=(0, 0))

    def catalog(self, service):
        return catalog.read(repository_paths(service.settings)[0]) or catalog.Catalog(URL)

    @invariant()
    def it_is_bounded(self):
        cache = self.services[0].cache
        with cache.locked():
            assert cache.usage() <= MOST

    @invariant()
    def snapshots_are_whole(self):
        for folder in Path(self.folder, "snapshots").iterdir():
            (model,) = (path for path in folder.iterdir() if path.name != FILES)
            got = {
                str(p.relative_to(model)): p.read_bytes() for p in model.rglob("*") if p.is_file()
            }
            assert any(
                name == model.name and got.items() <= dict(files).items()
                for name, files in self.remote.history
            )

    @invariant()
    def who_runs_keeps_what_it_runs_from(self):
        for service in self.services:
            assert all(map(service.cache.snapshot, service.running.values()))

    @invariant()
    def readers_find_folders_only(self):
        path = repository_paths(self.services[0].settings)[0]
        assert all(map(os.path.isdir, catalog.folders(path).values()))


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase
