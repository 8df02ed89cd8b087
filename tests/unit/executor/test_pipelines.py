"""Failures of pipelines of transformers, without transformers."""

from types import SimpleNamespace
from typing import Any

from shmserve.executor.backends.estimators.pipelines import _refusal


class Tokenizer:
    model_max_length = 3

    def __call__(self, text: str) -> dict[str, Any]:
        if text == "refused":
            raise ValueError("a language is needed")
        return {"input_ids": text.split()}


def test_a_tokenizers_failure_does_not_hide_the_pipelines() -> None:
    """Else the caller would be blamed, and the log would not have the pipeline's traceback."""
    model = SimpleNamespace(config=SimpleNamespace())
    pipeline = SimpleNamespace(tokenizer=Tokenizer(), model=model)
    failure = RuntimeError("the model is broken")
    assert _refusal(pipeline, ["refused"], failure) == ""
    assert _refusal(pipeline, ["a b c"], failure) == ""
    assert _refusal(pipeline, ["a", "a b c d"], failure) == (
        "text 1 has 4 tokens, and the model takes at most 3"
    )
