"""A blend changed during a run: from a position on, each data set resumes at its last sample in the
run.

A data set in both blends is asked for the same number of samples as before, so that the order
stays. New data sets begin at 0. An exhausted data set begins another pass, in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_lightning.data.order.resume_order import FIXED, OnChangedData, differences
from megatron_lightning.data.pretraining.blend_order import Blend, blend_index, normalized
from megatron_lightning.data.pretraining.blended import SURPLUS, BlendedDataset, BlendSpec, Sample
from megatron_lightning.errors import CheckpointError, ConfigError, DataError


class Make(Protocol):
    """Makes a data set."""

    def __call__(self, prefix: str, num_samples: int | None, pass_number: int = 0) -> Any:
        """Return the data set of a prefix. Every pass has a different order."""


@dataclass(frozen=True)
class Phase:
    """Start of a blend in a run."""

    position: int
    """Samples of the run before the blend."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Content of a data set -> first sample. Missing data sets begin at 0."""
    requests: Mapping[str, int | None] = field(default_factory=dict)
    """Content of a data set -> number of samples requested before."""

    def to_state(self) -> dict[str, Any]:
        """Return the phase as plain values."""
        return asdict(self)


class ContinuedBlend(Dataset[Sample]):
    """Samples of a run from :attr:`Phase.position` on.

    Args:
        spec: The data sets.
        contents: Digest of each.
        num_samples: Samples of the full run.
        phase: Start of the blend.
        make: Makes a data set.

    Raises:
        ConfigError: If the size of the run is unknown, or no sample is left.
    """

    def __init__(
        self,
        spec: BlendSpec,
        contents: Sequence[str],
        num_samples: int | None,
        phase: Phase,
        make: Make,
    ) -> None:
        if num_samples is None or num_samples <= phase.position:
            raise ConfigError(
                f"num_train_samples={num_samples}, and the run has read {phase.position} samples: "
                "changed data are read from there on. Set it to the samples of the full run."
            )
        remaining = num_samples - phase.position
        self.phase = phase
        self.contents = tuple(contents)
        # Without weights a data set weighs as much as the samples of one pass.
        sizes = () if spec.weights else [len(make(prefix, None)) for prefix in spec.prefixes]
        weights = normalized(spec.weights or [float(size) for size in sizes])
        self.blend = Blend(blend_index(weights, remaining), len(contents))
        counts = self.blend.consumed(remaining).tolist()
        # Each data set goes on where the earlier phase has left it, however the blend has changed.
        self.starts = [phase.starts.get(content, 0) for content in contents]
        self.requests = [
            phase.requests.get(content, ceil(ceil(remaining * weight) * (1 + SURPLUS)))
            for content, weight in zip(contents, weights.tolist(), strict=True)
        ]
        self.children: list[list[Any]] = []
        """Passes over each data set."""
        self.repeated: list[int] = []
        """Samples of each data set read once more by the run."""
        # As many passes as the blend needs behind the samples already read.
        for prefix, request, start, count in zip(
            spec.prefixes, self.requests, self.starts, counts, strict=True
        ):
            passes = [make(prefix, request)]
            num_passes = max(1, ceil((start + count) / len(passes[0])))
            passes += [make(prefix, request, number) for number in range(1, num_passes)]
            self.children.append(passes)
            self.repeated.append(max(0, start + count - len(passes[0])))

    def __len__(self) -> int:
        return self.phase.position + len(self.blend)

    def __getitem__(self, index: int) -> Sample:
        """Return sample ``index`` of the run.

        Raises:
            IndexError: If there is no such sample.
            DataError: If the sample precedes the change of the data.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if index < self.phase.position:
            raise DataError(
                f"sample {index} was read before the data changed, at sample "
                f"{self.phase.position}; set max_epochs to 1, or start a run from the weights alone"
            )
        dataset, number = self.blend[index - self.phase.position]
        passes = self.children[dataset]
        turn, inside = divmod(self.starts[dataset] + number, len(passes[0]))
        sample: Sample = passes[turn][inside % len(passes[turn])]
        return {"dataset_id": torch.tensor(dataset), **sample}

    def consumed(self, position: int) -> list[int]:
        """Return how many samples of each data set the run has read before ``position``."""
        counts = self.blend.consumed(max(0, position - self.phase.position))
        return [int(count) for count in np.add(counts, self.starts)]


def train_state(dataset: Any, contents: Sequence[str], consumed: int | None) -> dict[str, Any]:
    """Return a checkpoint's entry of the training data, beside the order: the number of samples
    read from each data set, the number requested from each data set, and the phase.

    Args:
        dataset: Data of training. None: there are no data yet.
        contents: Digest of each data set.
        consumed: Samples read by the run. None: the number is unknown.
    """
    phase = dataset.phase.to_state() if isinstance(dataset, ContinuedBlend) else None
    if dataset is None or consumed is None or consumed > len(dataset):
        return {"phase": phase, "datasets": []}
    if isinstance(dataset, ContinuedBlend):
        num_read, requests = dataset.consumed(consumed), dataset.requests
        prefixes = [passes[0].indexed.prefix for passes in dataset.children]
    elif isinstance(dataset, BlendedDataset):
        num_read = dataset.blend.consumed(consumed).tolist()
        requests = [child.num_samples for child in dataset.children]
        prefixes = [child.indexed.prefix for child in dataset.children]
    else:
        num_read, requests, prefixes = [consumed], [dataset.num_samples], [dataset.indexed.prefix]
    rows = zip(contents, prefixes, requests, num_read, strict=True)
    names = ("content", "prefix", "request", "consumed")
    return {"phase": phase, "datasets": [dict(zip(names, row, strict=True)) for row in rows]}


def goes_on(
    on_changed_data: OnChangedData, here: Mapping[str, Any], there: Mapping[str, Any]
) -> bool:
    """Return whether a run goes on with other data than the checkpoint's.

    Args:
        on_changed_data: The user's choice.
        here: Settings of the order in this run.
        there: Settings of the order in the checkpoint's run.
    """
    if on_changed_data not in ("continue", "restart") or not differences(here, there):
        return False
    fixed = {name: here[name] for name in FIXED if name in here}
    return not differences(fixed, there)


def next_phase(state: Mapping[str, Any], consumed_samples: int | None, *, restarts: bool) -> Phase:
    """Return the phase after a checkpoint.

    Args:
        state: Data sets of the checkpoint: content, request, and number of samples read.
        consumed_samples: Samples read by the run.
        restarts: Whether all data sets begin at 0 again.

    Raises:
        CheckpointError: If the checkpoint has no record of the samples read.
    """
    rows = state.get("datasets")
    if consumed_samples is None or not rows:
        raise CheckpointError(
            "the checkpoint does not say how many samples of each data set were read, so that "
            "changed data cannot go on from it. Set on_changed_data to reorder, or start a run "
            "from the weights alone (load_from_checkpoint)."
        )
    if restarts:
        return Phase(consumed_samples)
    return Phase(
        consumed_samples,
        {row["content"]: row["consumed"] for row in rows},
        {row["content"]: row["request"] for row in rows},
    )


def describe_phase(
    blend: ContinuedBlend, spec: BlendSpec, before: Mapping[str, Any], *, restarts: bool
) -> str:
    """Return a table of each data set: samples read before, samples still to be read, and samples
    read once more.
    """
    rows_before = {row["content"]: row for row in before["datasets"]}
    counts = blend.blend.consumed(len(blend.blend)).tolist()
    lines = [
        f"the data changed at sample {blend.phase.position}: "
        + ("all data sets begin again" if restarts else "data sets go on where they were left"),
        "data set, read before, read from now on, of these once more",
    ]
    for prefix, content, count, repeated in zip(
        spec.prefixes, blend.contents, counts, blend.repeated, strict=True
    ):
        num_read = rows_before.get(content, {}).get("consumed", 0)
        again = max(repeated, min(num_read, count)) if restarts else repeated
        lines.append(f"{prefix}, {num_read}, {count}, {again}")
    gone = [row for content, row in rows_before.items() if content not in blend.contents]
    lines += [f"{row['prefix']}, {row['consumed']}, 0, 0" for row in gone]
    return "\n".join(lines)
