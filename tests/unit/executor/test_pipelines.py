"""Failures of pipelines of transformers, without transformers."""

from collections.abc import Callable
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


def test_a_tokenizer_without_a_limit_leaves_it_to_the_model() -> None:
    tokenizer, failure = Tokenizer(), IndexError("index out of range in self")
    tokenizer.model_max_length = int(1e30)  # of transformers, for an unknown limit
    config = SimpleNamespace(max_position_embeddings=4)
    for modules, limit in (
        (positions_with(None), 4),
        (positions_with(0), 3),
        (positions_with(1), 2),
    ):
        model = SimpleNamespace(config=config, modules=modules)
        pipeline = SimpleNamespace(tokenizer=tokenizer, model=model)
        assert _refusal(pipeline, ["a " * limit], failure) == ""
        assert _refusal(pipeline, ["a " * (limit + 1)], failure) == (
            f"text 0 has {limit + 1} tokens, and the model takes at most {limit}"
        )


def positions_with(padding: int | None) -> Callable[[], list[SimpleNamespace]]:
    """Return a function that lists modules, one with a table of positions."""
    table = SimpleNamespace(padding_idx=padding)
    return lambda: [SimpleNamespace(), SimpleNamespace(position_embeddings=table)]
