"""Examples with images: LLaVA with a frozen tower on TP 2 x PP 2 and CP 2 equals one process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

pytest.importorskip("transformers")
pytest.importorskip("PIL")

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "captions.py"
LAYOUT = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 4
}  # fmt: skip


def train(folder: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Return the losses, and the tower's weights with their names on this rank."""
    names = runpy.run_path(str(EXAMPLE))
    module, images = names["Captions"](f"{folder}/llava"), names["Captioned"](f"{folder}/images")
    loader: Any = DataLoader(images, batch_size=16, collate_fn=names["Collate"](f"{folder}/llava"))
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer(strategy, max_steps=3, callbacks=[record]).fit(module, loader)
    tower = module.model.get_submodule("model.vision_tower").state_dict()
    return record.losses, {name: weight.clone() for name, weight in tower.items()}


@pytest.mark.slow
def test_a_frozen_tower_on_several_ranks(tmp_path: Path) -> None:
    names = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    names["make_model"](str(tmp_path / "llava"))
    names["draw"](tmp_path / "images")
    assert len(os.listdir(tmp_path / "images")) == 6
    ((losses, tower),) = run_ranks(1, train, str(tmp_path), None)
    ranks = run_ranks(4, train, str(tmp_path), LAYOUT)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-5)  # fp32, sums in another order
    held = [sum(weight.numel() for weight in mine.values()) for _, mine in ranks]
    for found, _ in run_ranks(2, train, str(tmp_path), {"context_parallel_size": 2}):
        assert found == pytest.approx(losses, rel=1e-5)
    assert sorted(count > 0 for count in held) == [False, False, True, True]  # the first stage
    assert losses[-1] < losses[0] and tower


def test_the_example_of_chats_makes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = runpy.run_path(str(EXAMPLES / "images.py"))
    names["make_model"](names["MODEL"])
    names["make_chats"]()
    images = ImageOptions(folder=str(names["IMAGES"]))
    data = FinetuneDataModule(
        str(names["CHATS"]), sequence_length=64, batch_size=2, images=images, cache_dir="cache"
    )
    data.use_model(HuggingFaceModule(names["MODEL"]))
    data.prepare_data()
    data.setup("fit")
    dataset: Any = data.train_dataset()
    row = dataset[(0,)]
    assert row["images"]["pixel_values"].shape == (1, 3, 32, 32)
    trained = row["labels"][row["labels"] >= 0]
    assert data.tokenizer.tokenizer.decode(trained) == "a blue circle </s>"
    assert (row["tokens"] == 3).sum() == 16  # places of the image


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes import torch and transformers
def test_the_example_of_chats_names_what_it_sees(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / "images.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert run.returncode == 0, run.stderr
    assert "-> 'a red square'" in run.stdout + run.stderr
