"""Checks of a command that runs a trained model, before any process starts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.inference.commands.generate import generate


def test_a_missing_model_is_named_before_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        generate(str(tmp_path), "x")


def test_a_mistyped_checkpoint_is_named_without_a_request_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path has the form of a Hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_lightning.bridge.hub._snapshot", None)
    with pytest.raises(MissingCheckpointError, match=r"file not found: checkpoints/last\.ckpt\."):
        generate("checkpoints/last.ckpt", "x")


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
        generate("checkpoints/last", "x")
    assert asked.called
    assert "(the Hub does not answer)" in str(caught.value)
    assert len(str(caught.value)) < 300


def _no_hub(*_: object, **__: object) -> None:
    raise LocalEntryNotFoundError("nobody answers" * 30)
