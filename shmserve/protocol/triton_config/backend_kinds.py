"""What a configuration must know of a backend, which itself is code of executors alone."""

from __future__ import annotations

from msgspec import Struct

AUTO, GPU, CPU, MODEL = "KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"


class BackendKind(Struct, frozen=True):
    """One backend, by the name that config.pbtxt has for it.

    Attributes:
        model_file: the file that a version's folder must hold, unless
            `default_model_filename` says otherwise.
        platforms: values of `platform` that mean this backend.
        platform: the one that is published for models that name none.
        config_optional: models are served without a config.pbtxt.
        completes: models can tell their tensors, so that a configuration may be incomplete.
        instance_kinds: what `instance_group.kind` may be. KIND_MODEL leaves the device to
            the model.
        needs_cupy: instances on a GPU need CuPy.
        device_hint: models tell their devices themselves, and where they do; instance groups
            then are not placed by us, and have no `gpus`.
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


# A model file may be a folder, which has ONNX models with external data
MODEL_FILE_IN_FOLDER = "model.onnx"
ONNXRUNTIME = "onnxruntime"
PYTHON = "python"
# No backend: its models have instances. It must be named by `platform`
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
            "pytorch",
            "model.pt",
            platforms=("pytorch_libtorch",),
            platform="pytorch_libtorch",
            instance_kinds=_ALL,
            needs_cupy=True,
        ),
        ENSEMBLE,
    )
}
