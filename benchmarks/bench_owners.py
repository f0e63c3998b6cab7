"""Cost of owners of full tensors in a step: Adafactor compared with AdamW.

    python -m benchmarks.bench_owners                    # ten rounds, minutes; writes results/
    python -m benchmarks.bench_owners --rounds 2 --quick # does it run?

A round trains each of the two with ``ddp`` and ``zero1`` on two processes, one after another. Both
pay the gather of parameters of ``zero1``, and Adafactor sends gradients to owners and results back.
So the ratio zero1 / ddp of Adafactor is divided by that of AdamW in the same round. Counted are
processor seconds of all threads in training steps, the mean of both ranks, without the first three.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import machine
from benchmarks.ranks import run
from benchmarks.small_runs import Losses, one_epoch
from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule

OPTIMIZERS, MODES = ("Adafactor", "AdamW"), ("ddp", "zero1")
LIMIT, WARM, BATCH = 1.1, 3, 4


class _Clock(pl.Callback):
    """Counts processor seconds of this process in steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin a step."""
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """End a step."""
        self.seconds.append(time.process_time() - self._start)


def _config(*, quick: bool) -> TransformerConfig:
    width, layers = (64, 2) if quick else (256, 4)
    return TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 32,
        vocab_size=8 * width,
        max_sequence_length=64,
    )


def _seconds(name: str, mode: str, config: TransformerConfig, steps: int) -> float:
    """Return the median processor seconds of a step on this rank."""
    generator = torch.Generator().manual_seed(0)
    shape = ((WARM + steps) * BATCH, config.max_sequence_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    clock = _Clock()
    trainer = one_epoch({"data_parallel": mode}, Losses())
    trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    module = GPTLightningModule(config, optimizer={"class_path": f"torch.optim.{name}"})
    trainer.fit(module, DataLoader(rows, BATCH // 2))  # type: ignore[arg-type]
    return statistics.median(clock.seconds[WARM:])


def measure(rounds: int, steps: int, config: TransformerConfig) -> list[dict[str, float]]:
    """Return the seconds of every round on this rank, by "optimizer mode"."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    places = [(name, mode) for name in OPTIMIZERS for mode in MODES]
    found = []
    for number in range(rounds):
        order = places if number % 2 == 0 else places[::-1]
        found.append(
            {f"{name} {mode}": _seconds(name, mode, config, steps) for name, mode in order}
        )
    return found


def page(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the table of the rounds' medians, and the ratio with the limit."""
    lines = ["| optimizer | ddp, ms | zero1, ms | zero1 / ddp |", "|---|---|---|---|"]
    ratios: dict[str, list[float]] = {}
    for name in OPTIMIZERS:
        ddp, zero1 = ([each[f"{name} {mode}"] for each in rounds] for mode in MODES)
        ratios[name] = [b / a for a, b in zip(ddp, zero1, strict=True)]
        row = [1e3 * statistics.median(ddp), 1e3 * statistics.median(zero1)]
        cells = [f"{value:.1f}" for value in row]
        lines.append(f"| {name} | {' | '.join(cells)} | {statistics.median(ratios[name]):.3f} |")
    quotients = [a / b for a, b in zip(*(ratios[name] for name in OPTIMIZERS), strict=True)]
    middle = statistics.median(quotients)
    verdict = "kept" if middle <= LIMIT else "MISSED"
    return [
        *lines,
        "",
        f"Adafactor's ratio is {middle:.3f} of AdamW's, the median of {len(rounds)} rounds "
        f"({min(quotients):.3f} to {max(quotients):.3f}); at most {LIMIT}: {verdict}.",
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a training")
    parser.add_argument("--quick", action="store_true", help="a tiny model, and nothing is written")
    parser.add_argument("--limit-s", type=float, default=7200.0)
    options = parser.parse_args()
    facts = machine.describe()
    config = _config(quick=options.quick)
    ranks = run(2, measure, options.rounds, options.steps, config, limit_s=options.limit_s)
    means = [
        {key: statistics.mean(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        for number in range(options.rounds)
    ]
    lines = page(means)
    print("\n".join(lines))
    if not options.quick:
        text = ["# Owners of full tensors", "", f"{machine.headline(facts)}.", "", *lines, ""]
        machine.keep(machine.RESULTS, "owners_cpu", facts, "\n".join(text), {"rounds": means})


if __name__ == "__main__":
    main()
