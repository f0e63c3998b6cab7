"""Chats with images of a packed epoch: rows, and the work of ranks with and without balance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from tests.helpers.chats import write_rows
from tests.helpers.image_folders import draw_image, make_image_folder, part, words

NUM_ROWS, NUM_RANKS = 16, 4
"""Rows of a step, and ranks."""


def mixed_rows(folder: Path, count: int) -> str:
    """Write short and long conversations, with up to two images of three sizes."""
    draw = np.random.default_rng(2)
    sizes = ((16, 16), (40, 24), (64, 64))
    files = [draw_image(folder / f"{n}.png", *size, n) for n, size in enumerate(sizes)]
    rows = []
    for _ in range(count):
        images = [part(files[n]) for n in draw.integers(0, 3, draw.integers(0, 3))]
        content = [*images, words("what " * int(draw.integers(1, 60)))]
        turns = [("user", content), ("assistant", "green")]
        rows.append({"messages": [{"role": role, "content": one} for role, one in turns]})
    return write_rows(folder / "chats.jsonl", rows)


def mixed_data(
    module: HuggingFaceModule, rows: str, folder: Path, **options: Any
) -> FinetuneDataModule:
    """Return data of these rows, ready for a fit."""
    data = FinetuneDataModule(
        rows, sequence_length=256, batch_size=2, images=ImageOptions(),
        cache_dir=str(folder / "cache"), **options,
    )  # fmt: skip
    data.use_model(module)
    data.prepare_data()
    data.setup("fit")
    return data


def measured_ranks(
    folder: Path, count: int = 60
) -> Iterator[tuple[FinetuneDataModule, list[float], float]]:
    """Yield data without and with ``balance_rows``, the operations of each conversation, as torch
    counts them, and the busiest rank's work beyond the mean. ``count``: number of conversations.
    """
    module = HuggingFaceModule(str(make_image_folder("qwen2_5_vl", folder)))
    module.configure_model()
    rows, counted = mixed_rows(folder, count), []
    for balanced in (0, NUM_ROWS):
        data = mixed_data(module, rows, folder, packing="online", balance_rows=balanced)
        counted = counted or [operations(module, data, n) for n in range(count)]
        work = np.array([sum(counted[n] for n in row) for row in data.row_order()])
        steps = work[: len(work) // NUM_ROWS * NUM_ROWS].reshape(
            -1, NUM_ROWS // NUM_RANKS, NUM_RANKS
        )
        ranks = steps.sum(1)
        yield data, counted, float((ranks.max(1) / ranks.mean(1) - 1).mean())


def operations(module: Any, data: Any, document: int) -> float:
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
