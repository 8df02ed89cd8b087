"""Facts about backends that the checks of a configuration need. Only executors import backends."""

from msgspec import Struct

AUTO, GPU, CPU, MODEL = "KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"


class BackendKind(Struct, frozen=True):
    """Description of a backend. `name` is the backend's name in config.pbtxt.

    Attributes:
        model_file: file that every version folder must hold, unless `default_model_filename` names
            another file.
        platforms: values of `platform` that select the backend.
        platform: value of `platform` published for models that give none.
        config_optional: models are served without a config.pbtxt, too.
        completes: models can name their tensors, so a configuration may be incomplete.
        instance_kinds: allowed values of `instance_group.kind`. KIND_MODEL leaves the device to
            the model.
        needs_cupy: instances on a GPU need CuPy.
        device_hint: where models of the backend name their devices, as text for error messages.
            With a hint, shmserve does not place instance groups and refuses `gpus`.
        other_files: further names of the model file, in the order of the search.
    """

    name: str
    model_file: str
    platforms: tuple[str, ...] = ()
    platform: str = ""
    config_optional: bool = False
    completes: bool = False
    instance_kinds: tuple[str, ...] = (AUTO, CPU)
    needs_cupy: bool = False
    device_hint: str = ""
    other_files: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Possible names of the model file; empty for ensembles."""
        return (self.model_file, *self.other_files) if self.model_file else ()


# The model file may instead be a folder with this file: ONNX models with external data.
MODEL_FILE_IN_FOLDER = "model.onnx"
ONNXRUNTIME = "onnxruntime"
PYTHON = "python"
PYTORCH = "pytorch"
EXPORTED = ".pt2"  # end of the names of exported programs, which are no TorchScript models
# Not a backend, because an ensemble has no instances. A configuration must select it by
# `platform`.
ENSEMBLE = BackendKind("ensemble", "", platforms=("ensemble",), platform="ensemble")
_ALL = (AUTO, CPU, GPU, MODEL)
BUILT_IN = {
    kind.name: kind
    for kind in (
        BackendKind(
            PYTHON,
            "model.py",
            platforms=("python",),
            config_optional=True,
            completes=True,
            instance_kinds=_ALL,
            needs_cupy=True,
        ),
        BackendKind(
            ONNXRUNTIME,
            "model.onnx",
            platforms=("onnxruntime_onnx", "onnx_onnxv1"),
            platform="onnxruntime_onnx",
            config_optional=True,
            completes=True,
            instance_kinds=(AUTO, CPU, GPU),  # ONNX models cannot choose a device
        ),
        BackendKind(
            PYTORCH,
            "model.pt",
            other_files=("model.pt2",),
            platforms=("pytorch_libtorch",),
            platform="pytorch_libtorch",
            completes=True,  # exported programs; TorchScript models: see `PytorchReader`
            instance_kinds=_ALL,
            needs_cupy=True,
        ),
        ENSEMBLE,
    )
}
# Backends of other libraries. Their models describe all tensors.
RUNTIMES = {
    name: BackendKind(
        name, files[0], config_optional=True, completes=True, other_files=tuple(files[1:])
    )
    for name, files in {
        "sklearn": ("model.joblib", "model.pkl", "model.pickle"),
        "xgboost": ("model.json", "model.ubj", "model.bst"),
        "lightgbm": ("model.txt", "model.bst"),
        "huggingface": ("config.json",),
    }.items()
}
