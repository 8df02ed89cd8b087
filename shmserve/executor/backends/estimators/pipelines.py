"""Hugging Face backend (`huggingface`): pipelines of transformers, from the files of a folder.

Names are MLServer's: the input `args` has texts, and the output `output` has a JSON document for
each text. Nothing is fetched from other hosts.
"""

from __future__ import annotations

import glob
import json
import os
from typing import Any

import numpy as np

from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.backend import Context
from shmserve.executor.backends import import_extra
from shmserve.executor.backends.estimators.matrix_backend import Matrix, MatrixBackend, Methods
from shmserve.executor.backends.graph_completion import GraphTensor
from shmserve.executor.backends.model_errors import sanitised
from shmserve.repository.text_files import printable
from shmserve.tensor.config_document import InputEntry
from shmserve.tensor.dtypes import object_array
from shmserve.tensor.spec import ModelSpec

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CODE = ("auto_map", "custom_pipelines")  # fields that name Python files
_TASKS = {  # tasks that need a text alone; the versions of transformers have some of these
    *("feature-extraction", "fill-mask", "ner", "sentiment-analysis", "summarization"),
    *("text-classification", "text-generation", "text-to-audio", "text-to-speech"),
    *("text2text-generation", "token-classification", "translation"),
}


class HuggingfaceBackend(MatrixBackend):
    """Runs the pipeline of the parameter `task`, on texts."""

    default_input = InputEntry("args", "TYPE_STRING")

    def open_model(self, path: str, context: Context) -> tuple[Methods, int | None]:
        spec = context.spec
        task = spec.parameters.get("task")
        if not task:
            raise ConfigError(
                f"model '{spec.name}': parameters.task is missing, such as 'text-classification'"
            )
        folder = os.path.dirname(path)
        self._check_code(folder, context)
        os.environ.update(dict.fromkeys(_OFFLINE, "1"))  # read by the import
        transformers = import_extra("transformers", spec.backend, spec.backend)
        _check_task(task, transformers.pipelines.get_supported_tasks(), context)
        weights = None if context.allow_model_code else True
        pipeline = transformers.pipeline(
            task,
            model=folder,
            tokenizer=folder,
            device="cpu",
            trust_remote_code=context.allow_model_code,
            model_kwargs={"use_safetensors": weights},
        )
        entry = (*spec.config.input, self.default_input)[0]

        def output(matrix: Matrix) -> Matrix:
            texts = matrix.ravel().tolist()
            try:
                return _documents(pipeline(texts))
            except Exception as ex:
                if reason := _refusal(pipeline, texts, ex):
                    raise InvalidArgument(f"input '{entry.name}': {reason}") from None
                raise

        return {"output": output}, None

    def input_dims(self, spec: ModelSpec, columns: int | None) -> tuple[int, ...]:
        return (1,) if spec.max_batch_size else (-1,)

    def tried(self, spec: ModelSpec, matrix: Matrix) -> dict[str, GraphTensor] | None:
        return {"output": GraphTensor("output", "BYTES", 0, ("rows", 1))}  # whatever the task is

    def _check_code(self, folder: str, context: Context) -> None:
        """Refuse Python files of the model, and weights in pickles, unless the service allows
        model code."""
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*config.json"))):
            with open(path, "rb") as file:
                fields = json.load(file)
            if isinstance(fields, dict) and any(fields.get(name) for name in _CODE):
                context.require_model_code(f"file '{os.path.basename(path)}' names Python files")
        if not glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
            context.require_model_code("weights are pickles, as there is no file '*.safetensors'")


def _check_task(task: str, known: list[str], context: Context) -> None:
    """Refuse tasks that need more than a text. A task of the model's own code may be any."""
    name = "translation" if task.startswith("translation_") else task
    if name not in _TASKS.intersection(known) and (name in known or not context.allow_model_code):
        raise ConfigError(
            f"model '{context.spec.name}': parameters.task '{printable(task)}' is no task of texts"
            f" alone: {', '.join(sorted(_TASKS.intersection(known)))} work; for others, write a"
            " model.py"
        )


def _refusal(pipeline: Any, texts: list[str], ex: Exception) -> str:
    """Return why a text makes a pipeline fail, or "" if the pipeline's own code is at fault."""
    if type(ex).__name__ == "PipelineException":  # a text without a mask, for `fill-mask`
        return sanitised(str(ex))
    if pipeline.tokenizer is None:
        return ""
    limit, added = _limit(pipeline), _added(pipeline)
    try:
        counts = [len(pipeline.tokenizer(text)["input_ids"]) for text in texts]
    except Exception:  # a tokenizer that needs more than a text: its failure is not the pipeline's
        return ""
    for place, count in enumerate(counts):
        if count + added > limit:
            beside = f" with the {added} that it adds" if added else ""
            return f"text {place} has {count} tokens, and the model takes at most {limit}{beside}"
    return ""


def _limit(pipeline: Any) -> int:
    """Return the largest number of tokens of a text, of the tokenizer's limit (a huge number, if
    the tokenizer knows none) and the model's. RoBERTa's positions begin after the padding token's
    index, so fewer positions are left for a text."""
    limits = [pipeline.tokenizer.model_max_length]
    if positions := getattr(pipeline.model.config, "max_position_embeddings", None):
        tables = (
            getattr(module, "position_embeddings", None) for module in pipeline.model.modules()
        )
        paddings = (getattr(table, "padding_idx", None) for table in tables)
        limits.append(positions - max((n + 1 for n in paddings if n is not None), default=0))
    return int(min(filter(None, limits)))


def _added(pipeline: Any) -> int:
    """Return the largest number of tokens that a pipeline appends to a text. The model's number
    comes before the pipeline's default; versions of transformers differ in where both are."""
    if getattr(pipeline.model.config, "is_encoder_decoder", False):
        return 0
    owners = (pipeline, "generation_config"), (pipeline.model, "generation_config")
    configs = [getattr(owner, name, None) for owner, name in owners]
    configs.append(getattr(pipeline, "_default_generation_config", None))
    return next(filter(None, (getattr(c, "max_new_tokens", None) for c in configs)), 0)


def _documents(results: list[Any]) -> Matrix:
    texts = [json.dumps(result, default=_plain) for result in results]
    return object_array(texts, (len(texts),))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
