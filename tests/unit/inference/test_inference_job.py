"""Checks of a command that runs a trained model, before any process starts."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_lightning.cli import _call
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.inference.commands.evaluate import evaluate
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.serve import serve


def test_a_missing_model_is_named_before_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        generate(ModelOptions(checkpoint=str(tmp_path)), "x")


def test_a_mistyped_checkpoint_is_named_without_a_request_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path has the form of a Hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_lightning.bridge.folders.hub._snapshot", None)
    with pytest.raises(MissingCheckpointError, match=r"file not found: checkpoints/last\.ckpt\."):
        generate(ModelOptions(checkpoint="checkpoints/last.ckpt"), "x")


def test_a_missing_path_is_named_before_the_answer_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        mock.patch("huggingface_hub.snapshot_download", side_effect=_no_hub) as asked,
        pytest.raises(
            MissingCheckpointError, match=r"^There is neither .* folder checkpoints/last"
        ) as caught,
    ):
        generate(ModelOptions(checkpoint="checkpoints/last"), "x")
    assert asked.called
    assert "(the Hub does not answer)" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_options_of_the_model_are_flat_on_the_command_line() -> None:
    def write(model: ModelOptions, prompts: list[str], *, limit: int = 3) -> Any:
        """Write.

        Args:
            model: The model.
            prompts: Texts.
            limit: A number.
        """
        return model, prompts, limit

    words = ["--checkpoint=a", "--prompts", "x", "y", "--tensor-model-parallel-size=2"]
    expected = ModelOptions(checkpoint="a", tensor_model_parallel_size=2), ["x", "y"], 3
    assert _call(write, "write", words) == expected
    several = _call(write, "write", [*words, "--pipeline_schedule", "1F0 1B0", "0F0 0B0"])
    assert several[0].pipeline_schedule == ["1F0 1B0", "0F0 0B0"]
    for command in (generate, evaluate, serve):
        assert next(iter(signature(command).parameters.values())).annotation == "ModelOptions"


def _no_hub(*_: object, **__: object) -> None:
    raise LocalEntryNotFoundError("nobody answers" * 30)
