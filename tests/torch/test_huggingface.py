"""Pipelines of transformers on a tiny model made here, compared with the pipeline's own answer."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Code, ConfigError
from tests.backend_runner import arrays, ask, failure, load
from tests.servers import Server

pytestmark = [pytest.mark.torch, pytest.mark.needs("transformers")]

TEXTS = ["good day", "bad day", "day"]
TASK = 'parameters { key: "task" value { string_value: "text-classification" } }'


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a classifier with random weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("saved")
    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "day"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=5, intermediate_size=8, max_position_embeddings=16, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def folder(root: Path, saved: Path, config: str = TASK, weights: str = "model.safetensors") -> str:
    (root / "m/1").mkdir(parents=True)
    for file in saved.iterdir():
        name = weights if file.suffix == ".safetensors" else file.name
        (root / "m/1" / name).write_bytes(file.read_bytes())
    (root / "m/config.pbtxt").write_text(f'backend: "huggingface" {config}')
    return str(root / "m")


def expected(saved: Path) -> list[Any]:
    from transformers import pipeline

    answers: list[Any] = pipeline("text-classification", model=str(saved), device="cpu")(TEXTS)
    return answers


@pytest.mark.parametrize(("more", "shape"), [("", (3,)), ("max_batch_size: 8", (3, 1))])
def test_a_pipeline_answers_as_itself(
    tmp_path: Path, saved: Path, more: str, shape: tuple[int, ...]
) -> None:
    backend, spec = load(folder(tmp_path, saved, TASK + more))
    assert [(t.name, t.datatype) for t in (*spec.inputs, *spec.outputs)] == [
        ("args", "BYTES"),
        ("output", "BYTES"),
    ]
    texts = np.array([text.encode() for text in TEXTS], object).reshape(shape)
    got = arrays(ask(backend, spec, args=texts))["output"]
    assert got.shape == (3, 1)
    for answer, own in zip(map(json.loads, got.ravel()), expected(saved), strict=True):
        assert answer["label"] == own["label"]
        assert answer["score"] == pytest.approx(own["score"], rel=1e-5)
    wrong = failure(ask(backend, spec, args=np.full(shape, b"\xff", object)))
    assert (wrong.code, "not UTF-8" in wrong.message) == (Code.INVALID_ARGUMENT, True)


def test_files_with_code_need_permission(tmp_path: Path, saved: Path) -> None:
    directory = folder(tmp_path / "a", saved, weights="pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"weights are pickles.*allow_model_code must be true"):
        load(directory)
    directory = folder(tmp_path / "b", saved)
    for name in ("config.json", "tokenizer_config.json"):
        file = tmp_path / "b/m/1" / name
        text = file.read_text()
        file.write_text(json.dumps({**json.loads(text), "auto_map": {"AutoConfig": "own.Own"}}))
        with pytest.raises(ConfigError, match=rf"'{name}' names Python files.*allow_model_code"):
            load(directory)
        file.write_text(text)
    load(directory)


def test_a_task_is_needed_and_must_exist(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"parameters.task is missing, such as"):
        load(folder(tmp_path / "a", saved, config=""))
    with pytest.raises(Exception, match=r"no-such-task"):
        load(folder(tmp_path / "b", saved, config=TASK.replace("text-class", "no-such-task")))


def test_a_folder_of_mlservers(tmp_path: Path, saved: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    for file in saved.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    settings = {
        "name": "m",
        "implementation": "mlserver_huggingface.HuggingFaceRuntime",
        "parameters": {"uri": "./", "extra": {"task": "text-classification"}},
    }
    (model / "model-settings.json").write_text(json.dumps(settings))
    body = {"inputs": [{"name": "args", "datatype": "BYTES", "shape": [3], "data": TEXTS}]}
    with Server(tmp_path, http_workers=1) as server:
        status, _, answer = server.request("POST", "/v2/models/m/infer", json.dumps(body))
        assert status == 200, answer
        (output,) = json.loads(answer)["outputs"]
        labels = [json.loads(text)["label"] for text in output["data"]]
    assert labels == [own["label"] for own in expected(saved)]
