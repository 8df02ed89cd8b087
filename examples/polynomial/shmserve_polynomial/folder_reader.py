"""Reader of model folders with `coefficients.json` in each version: numbers, highest power
first."""

from msgspec.structs import replace

from shmserve.protocol.triton_config import document
from shmserve.protocol.triton_config.backend_kinds import BackendKind
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.repository.folder_reader import FolderReader
from shmserve.tensor.spec import ModelSpec, TensorSpec


class PolynomialReader(FolderReader):
    """Recognises a model by its file. Needs no config.pbtxt: all models take X and give Y."""

    def completed(
        self, directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
    ) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
        spec = replace(
            spec,
            inputs=(TensorSpec("X", "FP32", (-1,)),),
            outputs=(TensorSpec("Y", "FP32", (-1,)),),
        )
        return document.completed(spec), groups


reader = PolynomialReader(BackendKind("polynomial", "coefficients.json", config_optional=True))
