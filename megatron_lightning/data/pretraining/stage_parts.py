"""Parts of indexed files read by a run: training, validation or test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from megatron_lightning.data.pretraining.blended import DataSpec
from megatron_lightning.data.pretraining.gpt_index import split_matrix
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.errors import ConfigError

_PARTS_OF_STAGES: Mapping[str, tuple[IndexSplit, ...]] = {
    "fit": ("train", "valid"),
    "validate": ("valid",),
    "test": ("test",),
    "predict": ("test",),
}
"""Parts of the split read by each stage of the Trainer."""


def parts_of_stage(
    stage: str, data: DataSpec, split: str, num_samples: Mapping[IndexSplit, int | None]
) -> dict[IndexSplit, int | None]:
    """Return the requested samples of the parts read by a stage. Other parts may be too small.

    Args:
        stage: Stage of the Trainer.
        data: The data.
        split: Weights of training, validation and test.
        num_samples: Requested samples of each part. None: an epoch.

    Raises:
        ConfigError: If the stage reads a single part, and the part is empty.
    """
    needed = _PARTS_OF_STAGES.get(stage, ())
    parts = zip(num_samples.items(), split_matrix(split), strict=True)
    found = {
        name: count
        for (name, count), bounds in parts
        if name in needed
        and (name == "train" or (data.blends(name) and (bounds or not data.is_split)))
    }
    if needed and not found:
        _refuse_empty(stage, needed[0], data, split)
    return found


def _refuse_empty(stage: str, name: IndexSplit, data: DataSpec, split: str) -> NoReturn:
    """Refuse a run without data. Lightning would end the run with a warning."""
    part = "validation" if name == "valid" else name
    if data.is_split:
        raise ConfigError(
            f"{stage} reads the {part} part, and split={split!r} gives it no document. Give the "
            "part a weight, such as split=90,5,5, or name its data: "
            "data_prefix={train: …, validation: …, test: …}."
        )
    raise ConfigError(
        f"{stage} reads the {part} data, and data_prefix has none. Add data under {part}."
    )
