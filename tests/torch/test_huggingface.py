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


def saved_in(folder: Path, kind: str) -> Path:
    """Save a model of 16 tokens with random weights. `kind`: class of transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", "good", "bad", "day"]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    if kind.startswith("GPT2"):
        config = transformers.GPT2Config(
            vocab_size=6, n_positions=16, n_embd=8, n_layer=1, n_head=2, pad_token_id=0
        )
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        family = "Roberta" if kind.startswith("Roberta") else "Bert"
        config = getattr(transformers, f"{family}Config")(
            vocab_size=6,
            intermediate_size=8,
            max_position_embeddings=16,
            **sizes,
            **({"pad_token_id": 1} if family == "Roberta" else {}),
        )
    model = getattr(transformers, kind)(config)
    if kind.startswith("GPT2"):
        model.generation_config.max_new_tokens = 6
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a classifier with random weights."""
    return saved_in(tmp_path_factory.mktemp("saved"), "BertForSequenceClassification")


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
    for task in ("no-such-task", "image-classification", "zero-shot-classification"):
        directory = folder(tmp_path / task, saved, TASK.replace("text-classification", task))
        text = rf"task '{task}' is no task of texts alone: .*text-classification, .* work; for oth"
        with pytest.raises(ConfigError, match=text):
            load(directory)
    with pytest.raises(Exception, match="no-such-task"):  # may be of the model's own code
        load(str(tmp_path / "no-such-task/m"), allow_model_code=True)


def refusal(directory: str, *texts: str) -> str:
    backend, spec = load(directory)
    given = np.array([text.encode() for text in texts], object)
    fine = arrays(ask(backend, spec, args=given[:1]))["output"]
    assert json.loads(fine[0, 0])
    error = failure(ask(backend, spec, args=given))
    assert error.code is Code.INVALID_ARGUMENT
    return error.message


def test_a_text_of_too_many_tokens_is_refused(tmp_path: Path, saved: Path) -> None:
    message = refusal(folder(tmp_path, saved), "good day", "day " * 17)
    assert message == "input 'args': text 1 has 17 tokens, and the model takes at most 16"


def test_positions_of_the_padding_do_not_count(tmp_path: Path) -> None:
    """RoBERTa's first position is behind that of its padding token, here 1."""
    saved = saved_in(tmp_path / "saved", "RobertaForSequenceClassification")
    message = refusal(folder(tmp_path, saved), "day " * 14, "day " * 15)
    assert message == "input 'args': text 1 has 15 tokens, and the model takes at most 14"


def test_tokens_that_a_model_adds_count_too(tmp_path: Path) -> None:
    saved = saved_in(tmp_path / "saved", "GPT2LMHeadModel")
    config = TASK.replace("text-classification", "text-generation") + 'input [{ name: "prompt" }]'
    backend, spec = load(folder(tmp_path, saved, config))
    error = failure(ask(backend, spec, prompt=np.array([b"day " * 12], object)))
    assert error.message == (
        "input 'prompt': text 0 has 12 tokens, and the model takes at most 16 with the 6 that it"
        " adds"
    )


def test_a_text_without_a_mask_is_refused(tmp_path: Path) -> None:
    saved = saved_in(tmp_path / "saved", "BertForMaskedLM")
    config = TASK.replace("text-classification", "fill-mask")
    message = refusal(folder(tmp_path, saved, config), "good [MASK]", "good day")
    assert message.startswith("input 'args': No mask_token ([MASK]) found")


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
