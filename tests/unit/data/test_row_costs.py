"""Rows of a step are dealt to ranks by the operations of text and of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.data.rows.row_costs import CostTable, RowCosts
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.modules.model_facts import ModelFacts
from megatron_lightning.planning import flops
from tests.helpers.gpt_folders import make_folder
from tests.helpers.image_balance import measured_ranks


def test_costs_are_of_text_and_of_every_image() -> None:
    costs = RowCosts(CostTable([0, 10], [0.0, 100.0]), CostTable([0, 4], [0.0, 8.0]))
    assert costs.of_documents([3, 5, 10], [[], [4], [1, 2]]).tolist() == [30.0, 58.0, 106.0]
    assert costs.of_documents([3, 5], []).tolist() == [30.0, 50.0]
    assert RowCosts(costs.text).of_documents([3], [[4]]).tolist() == [30.0]
    assert costs.digest != RowCosts(costs.text).digest


def test_ranks_compute_alike(tmp_path: Path) -> None:
    (_, _, wait), (data, counted, balanced) = measured_ranks(tmp_path)
    assert balanced <= 0.7 * wait
    estimated = data._costs_of(data._train)  # type: ignore[arg-type]
    assert np.corrcoef(estimated, counted)[0, 1] > 0.98


def test_a_folder_without_weights_has_costs(tmp_path: Path) -> None:
    folder = make_folder("qwen3", tmp_path)
    module = HuggingFaceModule(str(folder))
    expected = ModelFacts.of_module(module).row_costs(64)
    assert expected is not None and expected.image is None
    config = AutoBridge.from_hf_pretrained(str(folder)).to_config()
    assert expected.text.of([64])[0] == flops(config, batch_size=1, sequence_length=64)
    for file in folder.glob("*.safetensors"):  # as in a checkpoint
        file.unlink()
    assert ModelFacts.of_module(module).row_costs(64) == expected
    assert ModelFacts().row_costs(64) is None
