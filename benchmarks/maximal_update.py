"""Coordinate check of maximal updates, and the transfer of learning rates over widths.

    python -m benchmarks.maximal_update                 # slopes, in seconds
    python -m benchmarks.maximal_update --picture docs/images/maximal_update.svg
    python -m benchmarks.maximal_update --transfer      # 7 rates x 3 widths x 3 seeds: hours

*Coordinate check*: activations of a small GPT change in 1, 3 and 10 steps by as much at every
width. Printed is the slope of the log of the mean change over the log of the width. *Transfer*: the
rate at the minimum of a parabola through the losses of 7 rates, in steps of sqrt(2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import MaximalUpdate

READ = ("linear_qkv", "linear_proj", "linear_fc2", "output_layer")
"""Modules whose outputs are compared."""
STEPS, VOCABULARY, SEQUENCE = (1, 3, 10), 64, 32
RATES = [2**-9 * math.sqrt(2) ** n for n in range(-3, 4)]
Slopes = dict[tuple[str, int], float]


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


def best_step(rule: MaximalUpdate | None, width: int, seeds: int, steps: int) -> float:
    """Return the best rate of a width, in steps of sqrt(2) from the middle rate."""
    losses = [
        sum(_loss(width, rule, rate, seed, steps) for seed in range(seeds)) / seeds
        for rate in RATES
    ]
    x = torch.arange(-3.0, 4.0, dtype=torch.float64)
    powers = torch.stack([x**2, x, torch.ones_like(x)], dim=1)
    a, b, _ = torch.linalg.lstsq(powers, torch.tensor(losses, dtype=torch.float64)).solution
    return float(-b / (2 * a))


def main() -> None:
    """Print slopes, or best rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--transfer", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    rules = {"maximal": MaximalUpdate(base_width=min(options.widths)), "standard": None}
    if options.transfer:
        for label, rule in rules.items():
            for width in options.widths:
                best = best_step(rule, width, options.seeds, options.steps)
                print(f"{label}, width {width}: best rate {best:+.2f} steps of sqrt(2)", flush=True)
        return
    slopes = {label: change_slopes(rule) for label, rule in rules.items()}
    for key, value in slopes["maximal"].items():
        print(f"{key[0]}, {key[1]} steps: {value:+.2f}, standard {slopes['standard'][key]:+.2f}")
    if options.picture:
        options.picture.write_text(picture(slopes["maximal"], slopes["standard"]))


if __name__ == "__main__":
    main()
