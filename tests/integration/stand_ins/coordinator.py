"""Coordinator with a model repository described by one JSON file."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from shmserve import config, ids
from shmserve.coordinator import coordinator_loop
from shmserve.coordinator.assembly import Launch
from shmserve.errors import NotFound
from shmserve.observe import logs
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec


class Folder(msgspec.Struct):
    name: str
    count: int = 1
    parameters: dict[str, str] = {}
    failures: dict[str, str] = {}

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        return (ModelSpec(self.name, "1", "", "python", 0, (), (), parameters=self.parameters),)

    def instances(self) -> list[Instance]:
        spec = self.specs[0]
        return [
            Instance(ids.instance_name(self.name, "1", i), spec, "/nowhere")
            for i in range(self.count)
        ]


class Scan(msgspec.Struct):
    models: dict[str, Folder]
    failures: dict[str, str] = {}

    @property
    def skipped(self) -> Callable[[], list[str]]:
        return list


class Library:
    """Stands for `shmserve.repository`."""

    def scan(self, paths: Sequence[str]) -> Scan:
        with open(os.path.join(paths[0], "models.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=Scan)

    def survey(self, paths: Sequence[str]) -> dict[str, str]:
        found = self.scan(paths).models
        return {name: repr(folder) for name, folder in found.items()}

    def pending(self, paths: Sequence[str], wanted: Sequence[str]) -> bool:
        return False

    def locate(self, paths: Sequence[str], name: str) -> str:
        if name not in self.scan(paths).models:
            raise NotFound(f"model '{name}' is not in the repository")
        return os.path.join(paths[0], name)

    def fingerprint(self, directory: str) -> str:
        paths, name = os.path.split(directory)
        return self.survey([paths])[name]

    def read_folder(self, directory: str, override: str | None = None) -> Folder:
        paths, name = os.path.split(directory)
        folder = self.scan([paths]).models[name]
        if override is not None:
            return msgspec.structs.replace(folder, parameters=msgspec.json.decode(override))
        return folder


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--epoch", required=True)
    arguments = parser.parse_args()
    settings = config.load()
    logs.setup("coordinator", "info")
    run_dir = config.run_dir(settings)
    launch = Launch(settings, run_dir, arguments.process_id, arguments.epoch, arguments.master_fd)
    return coordinator_loop.run(launch, Library())


sys.exit(main())
