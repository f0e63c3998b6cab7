"""Checks of a command that runs a trained model, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lightning.errors import CheckpointError
from megatron_lightning.inference.generate import generate


def test_a_missing_model_is_named_before_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        generate(str(tmp_path), "x")
