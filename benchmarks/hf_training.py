"""Train a family of ``transformers`` under a layout and in one process, and compare the results.

A result is *equal*, *refused* (our error says why), *wrong*, *failed* (any other error), or
*sensitive*: the results differ, but those of one process differ as much when the weights are
changed by a rounding. Such a result says nothing.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import hf_families
from benchmarks.hf_families import Family
from benchmarks.ranks import run
from benchmarks.small_runs import Losses, num_ranks, one_epoch
from megatron_lightning.checkpoint import consolidate
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.models.plans.hf_plans import transformers_plan

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4, "micro_batch_size": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2pp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 2,
        },
    ),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp4": (4, {"context_parallel_size": 4}),
    "tp2cp2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "pp2cp2": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "micro_batch_size": 2,
        },
    ),
    "cp2ep2": (
        2,
        {
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "fsdpcp2": (4, {"data_parallel": "fsdp", "context_parallel_size": 2}),
    "tp2ep2": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}
"""Name -> (ranks, arguments of the strategy)."""

WAYS = "ways"
"""Column: how modules that mix tokens share rows in cp2."""

STEPS, BATCH = 4, 4
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Of the distance that a parameter has moved; beside it a few roundings of its own size."""

ROUNDING = 1e-7
SENSITIVITY = 10
"""Largest difference of a sensitive family, in units of the effect of a rounding."""


class CausalLM(pl.LightningModule):
    """An untouched model of a family, whose weights may be changed by a rounding."""

    sequence_dims: ClassVar[Mapping[str, int]] = {"inputs": 1, "targets": 1}

    def __init__(self, family: Family, config: Any, rounding: float = 0.0) -> None:
        super().__init__()
        self.family = family
        self.model_config = config
        self.rounding = rounding
        if family.kind == "images and text":  # full rows of tokens go into the model
            self.sequence_dims = {"targets": 1}  # type: ignore[misc]

    def configure_model(self) -> None:
        """Build the model; every rank keeps its part."""
        self.built()

    def built(self) -> CausalLM:
        """Return this module with its model."""
        self.model = hf_families.build(self.family, self.model_config)
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + self.rounding * torch.randn(parameter.shape, generator=noise))
        return self

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        return hf_families.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD: its steps show the size of a gradient."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(
    family: Family,
    config: Any,
    options: dict[str, Any] | None,
    path: str,
    rounding: float = 0.0,
) -> list[float]:
    """Train on this rank, save a checkpoint at ``path``, and return the losses.

    ``options`` are those of the strategy; None: plain Lightning.
    """
    warnings.filterwarnings("ignore")
    losses = Losses()
    is_fsdp = options is not None and options.get("data_parallel") == "fsdp"
    sharing = (options or {}).get("context_parallel_size", 1)
    replicas = num_ranks() // sharing if is_fsdp else 1
    trainer = one_epoch(options, losses)
    module = CausalLM(family, config, rounding)
    trainer.fit(module, DataLoader(hf_families.rows(STEPS * BATCH, family.kind), BATCH // replicas))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return losses.values


class Trained(NamedTuple):
    """The losses of a run, and its weights at the end."""

    losses: list[float]
    weights: Mapping[str, Tensor]


class Reference(NamedTuple):
    """One process: the shrunk configuration, the weights before training, and the results."""

    config: Any
    initial: Mapping[str, Tensor]
    trained: Trained


def load_weights(path: str) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint."""
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


def train_reference(family: Family, folder: str) -> tuple[Any, list[float]]:
    """Return the shrunk configuration and the losses of one process; its weights before and after
    are saved in ``folder``.
    """
    config = hf_families.small_config(family)
    torch.save(
        {"state_dict": CausalLM(family, config).built().state_dict()}, f"{folder}/initial.pt"
    )
    return config, train(family, config, None, f"{folder}/one.ckpt")


def reference(family: Family, folder: str, limit_s: float) -> Reference:
    """Return the results of one process."""
    [(config, losses)] = run(1, train_reference, family, folder, limit_s=limit_s)
    trained = Trained(losses, load_weights(f"{folder}/one.ckpt"))
    return Reference(config, load_weights(f"{folder}/initial.pt"), trained)


def train_layout(family: Family, config: Any, layout: str, folder: str, limit_s: float) -> Trained:
    """Return the results of a layout: losses are means over the data-parallel ranks."""
    size, options = LAYOUTS[layout]
    losses = run(size, train, family, config, options, f"{folder}/parts.ckpt", limit_s=limit_s)
    own = losses if "fsdp" in layout else losses[:1]
    consolidate(Path(folder, "parts.ckpt"), Path(folder, "full.ckpt"))
    means = [sum(step) / len(step) for step in zip(*own, strict=True)]
    return Trained(means, load_weights(f"{folder}/full.ckpt"))


def ways_of(path: Path) -> str:
    """Return how many modules share rows in which way, by a checkpoint of context-parallel ranks;
    attention of a known family is bound to the ranks without a search.
    """
    found: Mapping[str, str] = read_manifest(path).info.get("context_mixers") or {}
    counts = Counter(found.values())
    return ", ".join(f"{way} {count}" for way, count in sorted(counts.items())) or "known"


# ------------------------------------------------------------------------------------------ compare


class Difference(NamedTuple):
    """How far a run is from the reference, in units of the tolerances."""

    first_loss: float
    loss: float
    weight: float
    name: str
    """Of the weight."""

    def within(self, factor: float, own: Difference | None = None) -> bool:
        """Return whether nothing is more than ``factor`` times as far as ``own`` is, or the
        tolerance.
        """
        loss, weight = (own.loss, own.weight) if own else (0.0, 0.0)
        return (
            self.first_loss <= 1  # NaN is not
            and self.loss <= max(1.0, factor * loss)
            and self.weight <= max(1.0, factor * weight)
        )

    def __str__(self) -> str:
        if not self.loss <= 1:
            return f"losses differ by {self.loss * LOSS_TOLERANCE:.1e}"
        return f"{self.name} is off by {self.weight * WEIGHT_TOLERANCE:.1e} of its update"


def difference(run: Trained, expected: Reference) -> Difference:
    """Return how far a run is from the reference.

    Raises:
        ValueError: If the names of the weights differ.
    """
    one = expected.trained
    if one.weights.keys() != run.weights.keys():
        raise ValueError(f"{len(one.weights.keys() ^ run.weights.keys())} names differ")
    losses = [
        abs(a - b) / abs(b) / LOSS_TOLERANCE for a, b in zip(run.losses, one.losses, strict=True)
    ]
    farthest, place = 0.0, ""
    for name, weight in one.weights.items():
        if not weight.is_floating_point():
            continue
        moved = (weight - expected.initial[name]).norm()
        allowed = WEIGHT_TOLERANCE * moved + 1e-6 * weight.norm()
        error = float((run.weights[name] - weight).norm() / (allowed + 1e-12))
        if not error <= farthest:  # NaN is the farthest
            farthest, place = error, name
    worst = max(losses) if all(map(math.isfinite, losses)) else math.inf
    return Difference(losses[0], worst, farthest, place)


def compare(run: Trained, expected: Reference, rounded: Callable[[], Trained]) -> str:
    """Return "equal", or what differs; ``rounded`` trains one process whose weights are changed by
    a rounding.
    """
    try:
        found = difference(run, expected)
    except ValueError as error:
        return f"wrong: {error}"
    if found.within(1):
        return "equal"
    own = difference(rounded(), expected)
    if found.within(SENSITIVITY, own):
        return f"sensitive: {found}; changed by a rounding, in one process {own}"
    return f"wrong: {found}"


def verdict(error: BaseException | str) -> str:
    """Return the result that an error of the ranks means."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("megatron_lightning.errors.")]
    if ours:
        return f"refused: {ours[0].partition(': ')[2]}"
    return f"failed: {lines[-1][:300] if lines else 'no message'}"


def measure(family: Family, layouts: Sequence[str], limit_s: float) -> dict[str, str]:
    """Return the result of every layout for one family, or why there is no reference."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            hf_families.load(family)  # before the forks, which share it
            expected = reference(family, folder, limit_s)
        except Exception as error:
            return {"plain": f"not built: {str(error).strip().splitlines()[-1][:300]}"}

        def rounded() -> Trained:
            path = f"{folder}/rounded.ckpt"
            arguments = (family, expected.config, None, path, ROUNDING)
            [losses] = run(1, train, *arguments, limit_s=limit_s)
            return Trained(losses, load_weights(path))

        results = {"plain": "trained"}
        for layout in layouts:
            try:
                trained = train_layout(family, expected.config, layout, folder, limit_s)
                results[layout] = compare(trained, expected, rounded)
                if layout == "cp2":
                    results[WAYS] = ways_of(Path(folder, "parts.ckpt"))
            except Exception as error:
                results[layout] = verdict(error)
        return results


def shards_sequence(family: Family) -> str:
    """Return whether a family's activations are shards of the sequence under tensor parallelism,
    and why not.
    """
    try:
        config = hf_families.small_config(family)
        with torch.device("meta"):
            plan = transformers_plan(hf_families.load(family)(config), 2)
    except Exception as error:
        return verdict(f"megatron_lightning.errors.{type(error).__name__}: {error}")
    return "on" if plan.shards_sequence else f"off: {plan.why_full_sequence}"
