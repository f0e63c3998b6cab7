"""Train a family with a vision tower on chats with images, and compare layouts with one process.

    python -m benchmarks.hf_coverage --images --work images.jsonl

A tiny folder of the family (``tests.helpers.image_folders``) is fine-tuned by ``HuggingFaceModule``
and ``FinetuneDataModule``, as a user would. Rows have no image, one or two, of three sizes. With
``fsdp`` ranks have other rows, and the last step of one rank has no image: weights are compared,
and no losses.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.hf_training import LAYOUTS, Reference, Trained, compare, load_weights, verdict
from benchmarks.ranks import run
from benchmarks.small_runs import Losses, num_ranks, one_epoch
from megatron_lightning.checkpoint import consolidate
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from tests.helpers.image_folders import image_chats, make_image_folder

FROZEN = " frozen"
"""Behind a layout's name: the tower is not trained."""
COLUMNS = ("pp2", "tp2", "tp2pp2", "fsdp", "fsdp frozen", "pp2 frozen", "tp2ep2", "cp2")
STEPS, BATCH, NUM_RANKS = 4, 4, 2
_TOWERS = ("visual", "vision_tower", "vision_model")
_ROUNDING = 1e-7


def make_work(family: str, folder: str) -> None:
    """Write a family's model, rows with images and the name of the tower."""
    path = make_image_folder(family, Path(folder))
    path.rename(Path(folder, "model"))
    rows = image_chats(Path(folder), STEPS * BATCH)
    Path(folder, "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def tower_of(module: HuggingFaceModule) -> str:
    """Return the path of the vision tower."""
    return next(name for name, _ in module.named_modules() if name.rpartition(".")[2] in _TOWERS)


def train(folder: str, column: str, path: str, rounding: float = 0.0) -> list[float]:
    """Train on this rank, save a checkpoint at ``path``, and return the losses.

    Args:
        folder: Work folder of :func:`make_work`.
        column: Layout, and whether the tower is frozen. Without a layout: plain Lightning.
        path: Place of the checkpoint.
        rounding: Relative change of the weights.
    """
    warnings.filterwarnings("ignore")
    layout, is_frozen = column.removesuffix(FROZEN).strip(), column.endswith(FROZEN)
    is_fsdp = layout == "fsdp"
    losses = Losses()
    options = {"learning_rate": 0.05, "optimizer": _SGD}
    module = HuggingFaceModule(f"{folder}/model", **options)
    if is_frozen or rounding:
        module.configure_model()
    if is_frozen:
        tower = tower_of(module)
        module = HuggingFaceModule(f"{folder}/model", freeze=[tower], **options)
    if rounding:
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1 + rounding * torch.randn(weight.shape, generator=noise))
    data = FinetuneDataModule(
        f"{folder}/chats.jsonl",
        sequence_length=256,
        batch_size=BATCH // (num_ranks() if is_fsdp else 1),
        images=ImageOptions(),
        cache_dir=f"{folder}/cache",
    )
    trainer = one_epoch(LAYOUTS[layout][1] if layout else None, losses)
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return losses.values


_SGD = {"class_path": "torch.optim.SGD"}


def measure_images(family: str, columns: Sequence[str], limit_s: float) -> dict[str, str]:
    """Return the result of every column for one family, or why there is no reference."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(1, make_work, family, folder, limit_s=limit_s)  # forks of a clean process
            references = {
                frozen: _reference(folder, frozen, limit_s)
                for frozen in {FROZEN if name.endswith(FROZEN) else "" for name in columns}
            }
        except Exception as error:
            return {"plain": f"not built: {str(error).strip().splitlines()[-1][:300]}"}
        results = {"plain": "trained"}
        for column in columns:
            frozen = FROZEN if column.endswith(FROZEN) else ""
            expected = references[frozen]
            rounded = partial(_run, folder, frozen, limit_s, _ROUNDING)
            try:
                trained = _run(folder, column, limit_s)
                if column.startswith("fsdp"):  # means of other tokens
                    trained = trained._replace(losses=expected.trained.losses)
                results[column] = compare(trained, expected, rounded)
            except Exception as error:
                results[column] = verdict(error)
        return results


def _reference(folder: str, frozen: str, limit_s: float) -> Reference:
    initial = f"{folder}/initial.pt"
    run(1, _save_initial, folder, initial, limit_s=limit_s)
    return Reference(None, load_weights(initial), _run(folder, frozen, limit_s))


def _save_initial(folder: str, path: str) -> None:
    module = HuggingFaceModule(f"{folder}/model")
    module.configure_model()
    torch.save({"state_dict": module.state_dict()}, path)


def _run(folder: str, column: str, limit_s: float, rounding: float = 0.0) -> Trained:
    """Return the losses of the first rank, and the weights."""
    layout = column.removesuffix(FROZEN).strip()
    path = f"{folder}/{'parts' if layout else 'one'}.ckpt"
    size = LAYOUTS[layout][0] if layout else 1
    losses = run(size, train, folder, column, path, rounding, limit_s=limit_s)[0]
    if layout:
        consolidate(Path(path), Path(folder, "full.ckpt"))
        path = f"{folder}/full.ckpt"
    return Trained(losses, load_weights(path))
