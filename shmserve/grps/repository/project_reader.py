"""Reader of GRPS projects in the repository. Also completes workers of other backends that take
messages."""

from msgspec.structs import replace

from shmserve.errors import ConfigError
from shmserve.grps.protocol import model_parameters
from shmserve.grps.repository import project_files
from shmserve.grps.repository.project_files import Project
from shmserve.observe import gpus
from shmserve.protocol.triton_config import instance_groups
from shmserve.protocol.triton_config.backend_kinds import AUTO, CPU, GPU, BackendKind
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig
from shmserve.repository.folder_reader import FolderReader
from shmserve.tensor.config_document import TransactionEntry
from shmserve.tensor.spec import ModelSpec


class ProjectReader(FolderReader):
    """Reader of a folder that is a project, or whose version folders are projects."""

    def plain_versions(self, directory: str) -> list[int]:
        return [1] if project_files.is_plain(directory) else []

    def recognises(self, directory: str, version: int) -> bool:
        return bool(project_files.root_of(directory, str(version)))

    def missing(self, directory: str, version: int, config: ModelConfig) -> str:
        return ""  # `completed` reports missing files, which depend on the project

    def completed(
        self, directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
    ) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
        project = project_files.read(directory, spec.version, spec.name)
        config = replace(spec.config, model_transaction_policy=TransactionEntry(True))
        parameters = {**project.parameters, **spec.parameters}
        spec = replace(spec, parameters=parameters, decoupled=True, config=config)
        return spec, _placed(groups, project, spec.name)

    def with_parameters(self, spec: ModelSpec) -> ModelSpec:
        return model_parameters.completed(spec)


reader = ProjectReader(
    BackendKind(
        "grps",
        "inference.yml",
        config_optional=True,
        instance_kinds=(AUTO, CPU),
        device_hint="inference.yml tells the device",
    )
)


def _placed(
    groups: tuple[InstanceGroup, ...], project: Project, model: str
) -> tuple[InstanceGroup, ...]:
    """Return a project's instance groups, placed on the first device that the project's files
    name. The devices of `torch` models must exist. For the project's own code, the CPU will do.
    Raise ConfigError if a device does not exist, or a group is for the CPU only."""
    named = [(entry, gpu) for entry in project.models if (gpu := entry.gpu) is not None]
    needed = [(entry, gpu) for entry, gpu in named if entry.inferer_type == "torch"]
    visible = gpus.visible_devices() if named else ()
    where = f"model '{model}': inference.yml: device"
    for entry, gpu in needed:
        if gpu >= len(visible):
            available = instance_groups.there_are(len(visible)) if visible else "there is none"
            raise ConfigError(f"{where} '{entry.device}' needs a CUDA device, but {available}")
        if any(group.kind == CPU for group in groups):
            raise ConfigError(
                f"{where} '{entry.device}' does not go with instance_group.kind {CPU}"
            )
    if len({gpu for _, gpu in needed}) > 1 and visible[0].startswith("MIG-"):
        raise ConfigError(f"{where}s are several MIG devices, of which a process sees only one")
    first = next((gpu for _, gpu in needed or named), len(visible))
    if first >= len(visible):
        return groups
    kind = GPU if needed else AUTO
    return tuple(
        replace(group, kind=kind, gpus=(first,)) if group.kind == AUTO else group
        for group in groups
    )
