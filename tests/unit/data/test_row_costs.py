"""Rows of a step are dealt to ranks by the operations of text and of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from torch.utils.flop_counter import FlopCounterMode

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.data.rows.row_costs import CostTable, RowCosts
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from megatron_lightning.modules.model_facts import ModelFacts
from megatron_lightning.planning import flops
from tests.helpers.chats import write_rows
from tests.helpers.gpt_folders import make_folder
from tests.helpers.image_folders import draw_image, make_image_folder, part, words

NUM_ROWS, NUM_RANKS, NUM_DOCUMENTS = 16, 4, 60


def test_costs_are_of_text_and_of_every_image() -> None:
    costs = RowCosts(CostTable([0, 10], [0.0, 100.0]), CostTable([0, 4], [0.0, 8.0]))
    assert costs.of_documents([3, 5, 10], [[], [4], [1, 2]]).tolist() == [30.0, 58.0, 106.0]
    assert costs.of_documents([3, 5], []).tolist() == [30.0, 50.0]
    assert RowCosts(costs.text).of_documents([3], [[4]]).tolist() == [30.0]
    assert costs.digest != RowCosts(costs.text).digest


def _rows(folder: Path) -> str:
    """Write short and long conversations, with up to two images of three sizes."""
    draw = np.random.default_rng(2)
    sizes = ((16, 16), (40, 24), (64, 64))
    files = [draw_image(folder / f"{n}.png", *size, n) for n, size in enumerate(sizes)]
    rows = []
    for _ in range(NUM_DOCUMENTS):
        images = [part(files[n]) for n in draw.integers(0, 3, draw.integers(0, 3))]
        content = [*images, words("what " * int(draw.integers(1, 60)))]
        turns = [("user", content), ("assistant", "green")]
        rows.append({"messages": [{"role": role, "content": one} for role, one in turns]})
    return write_rows(folder / "chats.jsonl", rows)


def test_ranks_compute_alike(tmp_path: Path) -> None:
    module = HuggingFaceModule(str(make_image_folder("qwen2_5_vl", tmp_path)))
    module.configure_model()
    counted: list[float] = []
    waits = []
    for balanced in (0, NUM_ROWS):
        data = FinetuneDataModule(
            _rows(tmp_path), sequence_length=256, batch_size=2, packing="online",
            balance_rows=balanced, images=ImageOptions(), cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        data.use_model(module)
        data.prepare_data()
        data.setup("fit")
        counted = counted or [_operations(module, data, n) for n in range(NUM_DOCUMENTS)]
        work = np.array([sum(counted[n] for n in row) for row in data.row_order()])
        steps = work[: len(work) // NUM_ROWS * NUM_ROWS].reshape(
            -1, NUM_ROWS // NUM_RANKS, NUM_RANKS
        )
        ranks = steps.sum(1)
        waits.append(float((ranks.max(1) / ranks.mean(1) - 1).mean()))
    assert waits[1] <= 0.7 * waits[0]
    estimated = data._costs_of(data._train)  # type: ignore[arg-type]
    assert np.corrcoef(estimated, counted)[0, 1] > 0.98


def _operations(module: Any, data: Any, document: int) -> float:
    """Return the operations of a document alone, as torch counts them."""
    row = data.train_dataset()[(document,)]
    length = int((~row["padding"]).sum())
    images = [{name: one for name, one in row["images"].items() if one.numel()}]
    images[0] = {
        name: one[:, :length] if one.shape[1:] == (256,) else one for name, one in images[0].items()
    }
    has_pixels = any(one.is_floating_point() for one in images[0].values())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(row["tokens"][None, :length], images=images if has_pixels else ())
    return float(counter.get_total_flops())


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
