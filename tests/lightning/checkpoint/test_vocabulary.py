"""Checkpoints whose vocabulary is padded to another size: cut or extended by zeros, with their
optimizer states, if wanted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.shards.spec import Shard
from tests.helpers.layouts import tiny_config
from tests.lightning.support import ONE, TP2, Layout, run

USED, SIZES = 19, {"small": 21, "large": 32}
OPTIONS = CheckpointOptions(resize_vocabulary=True)


def _fit(
    layout: Layout,
    folder: str,
    size: str,
    tied: bool,
    hidden: int = 16,
    more: Any = None,
    save: str = "",
) -> list[str]:
    """Train one step, or one more after ``folder/checkpoint``; return the warnings that name the
    vocabulary."""
    config = tiny_config(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, ffn_hidden_size=32,
        vocab_size=SIZES[size],
        max_sequence_length=8, share_embeddings_and_output_weights=tied,
    )  # fmt: skip
    text = torch.randint(0, USED, (16, 9), generator=torch.Generator().manual_seed(3))
    loader = DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in text], batch_size=8)
    first = more is None
    fit = layout.trainer(folder, max_steps=1)
    fit = fit if first else _resuming(layout, folder, more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = GPTLightningModule(config, learning_rate=3e-3, warmup_steps=1, decay_steps=20)
        fit.fit(module, loader, ckpt_path=None if first else f"{folder}/first.ckpt")
    fit.save_checkpoint(f"{folder}/{save}.ckpt")
    return [str(w.message) for w in caught if "vocabulary" in str(w.message)]


def _resuming(layout: Layout, folder: str, options: CheckpointOptions) -> Any:
    from tests.helpers.trainers import trainer

    # As many steps as were taken: what was loaded is saved again.
    return trainer(
        layout.strategy(checkpoint_options=options), default_root_dir=folder, max_steps=1
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    source = open_checkpoint(path)
    tensors = {
        name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors().items()
    }
    source.read([(name, Shard((0,) * tensor.dim(), tensor)) for name, tensor in tensors.items()])
    return tensors


def _refused(layout: Layout, folder: str, size: str, tied: bool) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"word_embeddings\.weight: (21|32) rows in the[\s\S]*resize_vocabulary=True",
    ):
        _fit(layout, folder, size, tied, more=CheckpointOptions())


def _misshaped(layout: Layout, folder: str, size: str, tied: bool) -> None:
    # The vocabulary is as wide as the model.
    with pytest.raises(CheckpointError, match="do not fit"):
        _fit(layout, folder, size, tied, hidden=32, more=OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "sizes", "tied"),
    [
        pytest.param(TP2, ONE, ("large", "small"), True, id="tp2-cut-tp1"),
        pytest.param(ONE, TP2, ("small", "large"), False, id="tp1-extended-tp2"),
        pytest.param(TP2, TP2, ("large", "small"), False, id="tp2-cut-tp2"),
    ],
)
def test_rows_are_cut_or_zero(
    before: Layout, after: Layout, sizes: tuple[str, str], tied: bool, tmp_path: Path
) -> None:
    """Weights and moments; all other tensors are as they were."""
    run(before, _fit, tmp_path, sizes[0], tied, 16, None, "first")
    run(after, _refused, tmp_path, sizes[1], tied)
    run(after, _misshaped, tmp_path, sizes[1], tied)
    texts = run(after, _fit, tmp_path, sizes[1], tied, 16, OPTIONS, "second")[0]
    old, new = (_tensors(tmp_path / f"{name}.ckpt") for name in ("first", "second"))
    assert old.keys() == new.keys()
    resized = [name for name in old if old[name].shape != new[name].shape]
    # And a master copy.
    assert len(resized) == (1 if tied else 2) * 3 or len(resized) == (1 if tied else 2) * 4, resized
    rows = min(SIZES.values())
    for name, tensor in new.items():
        if name in resized:
            assert torch.equal(tensor[:rows], old[name][:rows]), name
            assert not tensor[rows:].any(), name
            assert any(
                f"{name}: {SIZES[sizes[0]]} rows in the checkpoint, {SIZES[sizes[1]]} in the model"
                in t
                for t in texts
            )
        else:
            assert torch.equal(tensor, old[name]), name
