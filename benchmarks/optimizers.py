"""Compare public optimizers on every layout with one process.

    python -m benchmarks.optimizers                          # prints the table
    python -m benchmarks.optimizers --write --work runs.jsonl  # docs/optimizers.md and results/
    python -m benchmarks.optimizers --optimizers AdamW Adafactor --layouts zero1 "tp 2"

Every optimizer trains a tiny Llama of ``transformers`` in fp32, and evaluates it, in one process
under plain Lightning and under each layout on CPU processes. The losses are compared. A cell is

    equal 3e-08        with the largest relative difference of a loss
    refused (group)    before the first step: it reads statistics of a group, and ranks have parts
    refused [1]        before the first step, as note 1 says
    WRONG 2e-03        the losses differ, or it was refused after a step
    failed [2]         any other error

A difference is allowed up to 1e-5, and up to three times what one process is off whose weights are
changed by a rounding: signs and 8 bits amplify one. The program ends with 1 if a cell is WRONG or
failed. Packages that are not installed are named. A line of the work file is a cell, so that a run
continues after the last one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks import machine
from benchmarks.ranks import run
from benchmarks.small_runs import Losses, num_ranks, one_epoch
from megatron_lightning.optim import ChainedOptimizer

DDP = {"data_parallel": "ddp"}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "ddp": DDP,
    "zero1": {},
    "fsdp": {"data_parallel": "fsdp"},
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
    "cp 2": {"context_parallel_size": 2, **DDP},
}
"""Name -> arguments of the strategy, for a Llama on two ranks."""
EXPERT_LAYOUTS: Mapping[str, dict[str, Any]] = {
    "experts, ep 2": {"expert_model_parallel_size": 2},
    "experts, tp 2, pp 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
    },
}
"""The same for a mixture of experts, by --layouts."""
ALL_LAYOUTS = {**LAYOUTS, **EXPERT_LAYOUTS}
FOUR_RANKS = ("experts, tp 2, pp 2",)
"""Layouts of four ranks. Others have two."""
BY_DATA = ("ddp", "zero1", "fsdp", "experts, ep 2")
"""Layouts whose ranks divide a batch."""

STEPS, BATCH, SEQUENCE, VOCABULARY, WIDTH = 6, 4, 16, 128, 64
TOLERANCE, ROUNDING, AMPLIFICATION = 1e-5, 1e-7, 3.0
PAGE = machine.ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
BAD = ("WRONG", "failed")


class Case(NamedTuple):
    """One optimizer."""

    package: str
    """Distribution that has it."""
    module: str
    name: str
    """Class."""
    options: dict[str, Any]
    others: bool = False
    """Whether it takes matrices only, beside an AdamW."""

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model's parameters."""
        optimizer = getattr(_module(self.module), self.name)
        if not self.others:
            return optimizer(model.parameters(), **self.options)
        is_matrix = {p: p.ndim == 2 and ".layers." in n for n, p in model.named_parameters()}
        matrices = [p for p, chosen in is_matrix.items() if chosen]
        rest = [p for p, chosen in is_matrix.items() if not chosen]
        return ChainedOptimizer(optimizer(matrices, **self.options), AdamW(rest, lr=1e-3))


def _torch(name: str, **options: Any) -> tuple[str, Case]:
    return name, Case("torch", "torch.optim", name, options)


CASES: Mapping[str, Case] = dict(
    [
        _torch("SGD", lr=0.1, momentum=0.9),
        _torch("Adam", lr=1e-3),
        _torch("AdamW", lr=1e-3),
        _torch("NAdam", lr=1e-3),
        _torch("RAdam", lr=1e-2),
        _torch("Adamax", lr=1e-3),
        _torch("Adadelta", lr=1.0),
        _torch("Adagrad", lr=1e-2),
        _torch("RMSprop", lr=1e-3),
        _torch("Rprop", lr=1e-3),
        _torch("ASGD", lr=0.1),
        _torch("LBFGS", lr=0.1, max_iter=3),
        _torch("Adafactor", lr=1e-2),
        ("Muon", Case("torch", "torch.optim", "Muon", {"lr": 0.02}, others=True)),
        ("Adafactor (transformers)", Case("transformers", "transformers.optimization", "Adafactor",
         {"lr": 1e-3, "relative_step": False, "scale_parameter": False})),
        ("Prodigy", Case("prodigyopt", "prodigyopt", "Prodigy", {"d0": 1e-3})),
        ("DAdaptAdam", Case("dadaptation", "dadaptation", "DAdaptAdam", {"d0": 1e-3})),
        ("DAdaptLion", Case("dadaptation", "dadaptation", "DAdaptLion", {"d0": 1e-3})),
        ("AdamWScheduleFree", Case("schedulefree", "schedulefree", "AdamWScheduleFree",
         {"lr": 1e-2})),
        ("SGDScheduleFree", Case("schedulefree", "schedulefree", "SGDScheduleFree", {"lr": 1.0})),
        ("Lion", Case("lion-pytorch", "lion_pytorch", "Lion", {"lr": 1e-3})),
        ("AdafactorBigVision", Case("timm", "timm.optim.adafactor_bv", "AdafactorBigVision",
         {"lr": 1e-2})),
        ("Lamb", Case("timm", "timm.optim.lamb", "Lamb", {"lr": 1e-2})),
        ("Lars", Case("timm", "timm.optim.lars", "Lars", {"lr": 1.0, "weight_decay": 1e-4})),
        ("AdamP", Case("timm", "timm.optim.adamp", "AdamP", {"lr": 1e-3})),
        ("SGDP", Case("timm", "timm.optim.sgdp", "SGDP", {"lr": 0.1, "momentum": 0.9})),
        ("Adan", Case("timm", "timm.optim.adan", "Adan", {"lr": 1e-3})),
        ("SOAP", Case("pytorch-optimizer", "pytorch_optimizer", "SOAP", {"lr": 1e-3})),
        ("Shampoo", Case("pytorch-optimizer", "pytorch_optimizer", "Shampoo", {"lr": 1e-3})),
        ("CAME", Case("pytorch-optimizer", "pytorch_optimizer", "CAME", {"lr": 1e-3})),
        ("AdEMAMix", Case("pytorch-optimizer", "pytorch_optimizer", "AdEMAMix", {"lr": 1e-3})),
        ("StableAdamW", Case("pytorch-optimizer", "pytorch_optimizer", "StableAdamW",
         {"lr": 1e-3})),
        ("AdamW8bit", Case("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {"lr": 1e-3})),
    ]
)  # fmt: skip
"""Name in the table -> optimizer. Rates of estimated step sizes start high, so that they move."""


def _module(name: str) -> Any:
    """Import a module; of timm without its packages, which import torchvision."""
    for package in ("timm", "timm.optim") if name.startswith("timm.") else ():
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {package!r}")
            sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(name)


# -------------------------------------------------------------------------------------------- train


class Llama(pl.LightningModule):
    """A tiny Llama; ``rounding`` changes its weights by a relative error."""

    sequence_dims: ClassVar[Mapping[str, int]] = {"inputs": 1, "targets": 1}

    def __init__(self, optimizer: str, rounding: float = 0.0, *, experts: bool = False) -> None:
        super().__init__()
        self.optimizer = optimizer
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.1,
            "use_cache": False,
        }
        self.model: nn.Module = (
            MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4))
            if experts
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + rounding * torch.randn_like(parameter))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        return self._loss(batch)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["inputs"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of the case."""
        return CASES[self.optimizer].build(self)

    def on_train_epoch_start(self) -> None:
        """Switch schedule-free optimizers to training weights."""
        self._switch("train")

    def on_validation_start(self) -> None:
        """Switch schedule-free optimizers to averaged weights."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for optimizer in self.trainer.optimizers:
            getattr(optimizer, mode, lambda: None)()


def _rows(seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=generator)
    return [{"inputs": row[:-1], "targets": row[1:]} for row in tokens]


def has_experts(layout: str) -> bool:
    """Return whether a layout is tried on a mixture of experts."""
    return layout in EXPERT_LAYOUTS


def train(
    name: str, layout: str | None, rounding: float = 0.0, *, experts: bool = False
) -> list[float]:
    """Return the losses of the steps on this rank, and the loss of the evaluation after them.

    Args:
        name: Key of :data:`CASES`.
        layout: Key of :data:`ALL_LAYOUTS`; None: plain Lightning.
        rounding: Relative error of the first weights.
        experts: Whether plain Lightning trains the mixture of experts.

    Raises:
        RuntimeError: If the optimizer is refused after a step.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = None if layout is None else ALL_LAYOUTS[layout]
    losses = Losses()
    trainer = one_epoch(options, losses, num_sanity_val_steps=0)
    size = BATCH // num_ranks() if layout in BY_DATA else BATCH
    try:
        trainer.fit(
            Llama(name, rounding, experts=experts or has_experts(layout or "")),
            DataLoader(_rows(1, STEPS * BATCH), size),  # type: ignore[arg-type]
            DataLoader(_rows(2, 2 * BATCH), size),  # type: ignore[arg-type]
        )
    except Exception as error:
        if losses.values:
            raise RuntimeError(f"after {len(losses.values)} steps: {error}") from error
        raise
    return [*losses.values, float(trainer.callback_metrics["loss"])]


# ------------------------------------------------------------------------------------------ compare


class Reference(NamedTuple):
    """One process under plain Lightning."""

    losses: list[float]
    tolerance: float


def reference(name: str, limit_s: float, *, experts: bool = False) -> Reference:
    """Return the losses of one process, and how far those of others may be off."""
    alone = partial(train, name, None, experts=experts)
    [losses] = run(1, alone, limit_s=limit_s)
    [rounded] = run(1, alone, ROUNDING, limit_s=limit_s)
    return Reference(losses, max(TOLERANCE, AMPLIFICATION * difference([rounded], losses)))


def difference(ranks: Sequence[Sequence[float]], expected: Sequence[float]) -> float:
    """Return the largest relative difference of a loss, the mean over the ranks."""
    means = [sum(values) / len(values) for values in zip(*ranks, strict=True)]
    pairs = zip(means, expected, strict=True)
    differences = [abs(own - right) / abs(right) for own, right in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def measure(name: str, layout: str, expected: Reference, limit_s: float) -> str:
    """Return the cell of one optimizer and layout, with what was said after a colon."""
    try:
        ranks = run(4 if layout in FOUR_RANKS else 2, train, name, layout, limit_s=limit_s)
    except RuntimeError as error:
        return verdict(str(error))
    found = difference(ranks, expected.losses)
    kind = "equal" if found <= expected.tolerance else "WRONG"
    return f"{kind} {found:.0e}"


def verdict(text: str) -> str:
    """Return the cell that an error of a rank means."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("megatron_lightning.errors.")]
    if any(line.startswith("RuntimeError: after ") for line in lines):
        return f"WRONG: {lines[-1][:200]}"
    if not ours:
        return f"failed: {lines[-1][:200] if lines else 'no message'}"
    message = ours[0].partition(": ")[2]
    if "reads statistics" in message:
        return "refused (group)"
    return f"refused: {message.partition('. ')[0][:200]}"


# -------------------------------------------------------------------------------------------- table


def table(cells: Mapping[str, Mapping[str, str]], layouts: Sequence[str]) -> list[str]:
    """Return the lines of the table and its notes.

    Args:
        cells: Optimizer -> layout -> cell.
        layouts: Columns.
    """
    lines = [f"| optimizer | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    notes: list[str] = []
    for name, row in cells.items():
        shown = []
        for layout in layouts:
            kind, _, note = row.get(layout, "").partition(": ")
            if note and note not in notes:
                notes.append(note)
            shown.append(f"{kind} [{notes.index(note) + 1}]" if note else kind)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return [*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]


def versions(names: Iterable[str]) -> str:
    """Return the packages of some optimizers with their versions."""
    packages = dict.fromkeys(["torch", *(CASES[name].package for name in names)])
    return ", ".join(f"{package} {version(package)}" for package in packages)


def installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the optimizers that can be imported, and the others."""

    def is_there(case: Case) -> bool:
        try:
            return hasattr(_module(case.module), case.name)
        except ImportError:
            return False

    there = [name for name in names if is_there(CASES[name])]
    return there, [name for name in names if name not in there]


def write(page: Path, lines: Sequence[str]) -> None:
    """Replace the table of a page of the docs."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *lines, END + after]))


def fill(
    names: Sequence[str], layouts: Sequence[str], work: Path | None, limit_s: float
) -> dict[str, dict[str, str]]:
    """Return every cell, from the work file or measured."""
    cells: dict[str, dict[str, str]] = {name: {} for name in names}
    if work is not None and work.exists():
        for name, layout, cell in map(json.loads, work.read_text().splitlines()):
            cells.setdefault(name, {})[layout] = cell
    for name in names:
        missing = [layout for layout in layouts if layout not in cells[name]]
        if not missing:
            continue
        expected = {
            experts: reference(name, limit_s, experts=experts)
            for experts in {has_experts(layout) for layout in missing}
        }
        for layout in missing:
            mine = expected[has_experts(layout)]
            cell = cells[name][layout] = measure(name, layout, mine, limit_s)
            print(f"{name}, {layout}: {cell} (allowed {mine.tolerance:.0e})", flush=True)
            if work is not None:
                with work.open("a") as file:
                    file.write(json.dumps([name, layout, cell]) + "\n")
    return {name: cells[name] for name in names}


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--optimizers", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--layouts", nargs="+", choices=list(ALL_LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--work", type=Path, help="file with a line per cell")
    parser.add_argument("--limit-s", type=float, default=180.0, help="of one run of one optimizer")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and results/")
    options = parser.parse_args()
    facts = machine.describe()
    there, missing = installed(options.optimizers)
    cells = fill(there, options.layouts, options.work, options.limit_s)
    facts["load_average_at_end"] = [round(load, 2) for load in os.getloadavg()]
    lines = [
        f"{facts['date'][:10]}, {versions(there)}. Not installed: {', '.join(missing) or 'none'}.",
        "",
        *table(cells, options.layouts),
    ]
    print("\n".join(lines))
    if options.write:
        write(PAGE, lines)
        page = "\n".join(
            ["# Optimizers and layouts", "", f"{machine.headline(facts)}.", "", *lines]
        )
        machine.keep(machine.RESULTS, "optimizers_cpu", facts, page + "\n", {"cells": cells})
    if any(cell.startswith(BAD) for row in cells.values() for cell in row.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
