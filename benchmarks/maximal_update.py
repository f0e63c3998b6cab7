"""Coordinate check of maximal updates, and the transfer of learning rates over widths.

    python -m benchmarks.maximal_update                 # slopes, in seconds
    python -m benchmarks.maximal_update --picture docs/images/maximal_update.svg
    python -m benchmarks.maximal_update --transfer --work runs.jsonl --write

*Coordinate check*: activations of a small GPT change in 1, 3 and 10 steps by as much at every
width. Printed is the slope of the log of the mean change over the log of the width. *Transfer*: 7
rates x 3 widths x 3 seeds, in an hour of a core; the best rate of a width is the minimum of a
parabola through the losses, in steps of sqrt(2). A line of the work file is a training, so that a
run continues after the last one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import machine
from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import MaximalUpdate

READ = ("linear_qkv", "linear_proj", "linear_fc2", "output_layer")
"""Modules whose outputs are compared."""
STEPS, VOCABULARY, SEQUENCE = (1, 3, 10), 64, 32
MIDDLE = 2**-9
"""The middle rate of a transfer."""
Slopes = dict[tuple[str, int], float]
Place = tuple[Any, ...]
"""Parametrization, width, rate and seed of a training."""


def _module(width: int, rule: MaximalUpdate | None, rate: float, seed: int) -> GPTLightningModule:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=width // 16,
        ffn_hidden_size=2 * width,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        init_seed=seed,
    )
    module = GPTLightningModule(config, learning_rate=rate, weight_decay=0.0, maximal_update=rule)
    module.configure_model()
    return module


def _tokens(seed: int, rows: int = 4) -> Tensor:
    """Return rows in which a token tells the next one most of the time."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(9))
    tokens = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
    for at in range(1, SEQUENCE + 1):
        told = torch.rand(rows, generator=generator) < 0.8
        tokens[:, at] = torch.where(told, follows[tokens[:, at - 1]], tokens[:, at])
    return tokens


def _changes(
    width: int, rule: MaximalUpdate | None, rate: float, seed: int
) -> dict[tuple[str, int], float]:
    """Return the mean change of each output after some steps."""
    module = _module(width, rule, rate, seed)
    optimizer, tokens = module._optimizer(), _tokens(seed)
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: object, __: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            outputs[name] = tensor.detach().clone()

        return hook

    assert module.model is not None
    for name, child in module.model.named_modules():
        if name.endswith(READ):
            child.register_forward_hook(keep(name))
    first: dict[str, Tensor] = {}
    changes = {}
    for step in range(max(STEPS) + 1):
        loss = module.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        first = first or dict(outputs)
        if step in STEPS:
            changes |= {
                (name, step): float((value - first[name]).abs().mean())
                for name, value in outputs.items()
            }
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return changes


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = torch.tensor(points, dtype=torch.float64).log().T
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def change_slopes(
    rule: MaximalUpdate | None,
    widths: Sequence[int] = (128, 256, 512),
    rate: float = 3e-4,
    num_seeds: int = 1,
) -> Slopes:
    """Return the slope of each output's change over the width, by module and step. Outputs without
    a change are left out: an output layer that begins at zero alone moves in the first step.
    """
    runs = [
        (width, _changes(width, rule, rate, seed)) for width in widths for seed in range(num_seeds)
    ]
    return {
        key: _slope([(width, changes[key]) for width, changes in runs])
        for key in runs[0][1]
        if all(changes[key] for _, changes in runs)
    }


def picture(maximal: Slopes, standard: Slopes) -> str:
    """Return an SVG with a line for the slope of each module after 10 steps."""
    rows = [name for name, step in maximal if step == max(STEPS)]
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" width="640" '
             f'height="{40 + 24 * len(rows)}" font-family="sans-serif" font-size="12">',
             '<text x="8" y="16">slope of the change after 10 steps over the width: '
             "● maximal updates, ○ standard</text>"]  # fmt: skip
    for index, name in enumerate(rows):
        y, zero, unit = 40 + 24 * index, 330, 90
        lines.append(f'<text x="8" y="{y + 4}">{name.removeprefix("decoder.")}</text>')
        lines.append(f'<line x1="{zero}" x2="630" y1="{y}" y2="{y}" stroke="#ccc"/>')
        for slopes, fill in ((maximal, "black"), (standard, "none")):
            at = zero + unit * slopes[name, max(STEPS)]
            lines.append(f'<circle cx="{at:.0f}" cy="{y}" r="5" fill="{fill}" stroke="black"/>')
    return "\n".join([*lines, "</svg>", ""])


def _loss(width: int, rule: MaximalUpdate | None, rate: float, seed: int, steps: int) -> float:
    module = _module(width, rule, rate, seed)
    optimizer, losses = module._optimizer(), []
    assert module.model is not None
    for step in range(steps):
        tokens = _tokens(1000 * seed + step, 16)
        loss = module.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20


class Sweep(NamedTuple):
    """Trainings of all rates, widths and seeds, with and without maximal updates."""

    widths: Sequence[int]
    seeds: int
    steps: int
    rates: Sequence[float]

    def losses(self, work: Path | None) -> dict[Place, float]:
        """Return the loss of every training, from the work file or trained."""
        found: dict[Place, float] = {}
        if work is not None and work.exists():
            found = {tuple(place): loss for *place, loss in map(json.loads, work.open())}
        rules = {"maximal": MaximalUpdate(base_width=min(self.widths)), "standard": None}
        for seed, width in itertools.product(range(self.seeds), self.widths):
            for label, rate in itertools.product(rules, self.rates):
                place = (label, width, rate, seed)
                if place not in found:
                    found[place] = _loss(width, rules[label], rate, seed, self.steps)
                    if work is not None:
                        with work.open("a") as file:
                            file.write(json.dumps([*place, found[place]]) + "\n")
        return found

    def page(self, losses: Mapping[Place, float]) -> list[str]:
        """Return a table with the mean loss of each rate, and the best rate of each width."""
        head = ["", "width", *(f"{rate:.2e}" for rate in self.rates), "best step"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        moves = []
        for label in ("maximal", "standard"):
            best = {}
            for width in self.widths:
                row = [
                    sum(losses[label, width, rate, seed] for seed in range(self.seeds)) / self.seeds
                    for rate in self.rates
                ]
                best[width] = best_step(row)
                cells = [label, str(width), *(f"{loss:.4f}" for loss in row), f"{best[width]:+.2f}"]
                lines.append(f"| {' | '.join(cells)} |")
            move = max(best.values()) - min(best.values())
            moves.append(f"{label}: the best rate moves by {move:.2f} steps of sqrt(2)")
        return [*lines, "", *moves]


def best_step(losses: Sequence[float]) -> float:
    """Return the minimum of a parabola through the losses of rates, in steps from the middle
    rate.
    """
    half = len(losses) // 2
    x = torch.arange(-half, half + 1, dtype=torch.float64)
    powers = torch.stack([x**2, x, torch.ones_like(x)], dim=1)
    a, b, _ = torch.linalg.lstsq(powers, torch.tensor(losses, dtype=torch.float64)).solution
    return float(-b / (2 * a))


def _transfer(sweep: Sweep, work: Path | None, *, is_kept: bool) -> None:
    facts = machine.describe()
    losses = sweep.losses(work)
    lines = [
        f"{sweep.seeds} seeds, {sweep.steps} steps of 16 rows of {SEQUENCE} tokens, 2 layers, "
        "AdamW; the mean loss of the last 20 steps.",
        "",
        *sweep.page(losses),
    ]
    print("\n".join(lines))
    if is_kept:
        page = ["# Transfer of learning rates", "", f"{machine.headline(facts)}.", "", *lines, ""]
        numbers = {"losses": [[*place, loss] for place, loss in losses.items()]}
        machine.keep(machine.RESULTS, "maximal_update_cpu", facts, "\n".join(page), numbers)


def main() -> None:
    """Print slopes, or best rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--transfer", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=MIDDLE, help="the middle of 7 rates")
    parser.add_argument("--work", type=Path, help="file with a line per training")
    parser.add_argument("--write", action="store_true", help="write a page to results/")
    options = parser.parse_args()
    if options.transfer:
        rates = [options.rate * math.sqrt(2) ** n for n in range(-3, 4)]
        sweep = Sweep(options.widths, options.seeds, options.steps, rates)
        _transfer(sweep, options.work, is_kept=options.write)
        return
    rules = {"maximal": MaximalUpdate(base_width=min(options.widths)), "standard": None}
    slopes = {label: change_slopes(rule) for label, rule in rules.items()}
    for key, value in slopes["maximal"].items():
        print(f"{key[0]}, {key[1]} steps: {value:+.2f}, standard {slopes['standard'][key]:+.2f}")
    if options.picture:
        options.picture.write_text(picture(slopes["maximal"], slopes["standard"]))


if __name__ == "__main__":
    main()
