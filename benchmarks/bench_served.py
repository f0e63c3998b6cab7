"""Training with weights rounded as servers hold them: time of a step, and what it is worth.

    python -m benchmarks.bench_served          # minutes; writes results/
    python -m benchmarks.bench_served --quick  # seconds, tiny: does it run?

Time: forward and backward of a layer of 1,024 x 1,024 on 2,048 tokens, whose weight is rounded once
a step, beside the plain layer, in turn, in processor seconds.

Worth: a GPT of two layers learns the bytes of this project's pages, and is then trained for further
steps, whose learning rate ends at 0:

    PTQ   without rounding, rounded at the end
    QAT   from the same weights on the same batches, with rounding
    QAD   from the weights that PTQ rounds on the same batches again, with rounding, by the
          predictions of these weights without rounding, and no labels

Losses are those of pages that no training has seen, computed with rounded weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.command_line import measured_page, print_page
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from megatron_lightning.config import TransformerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.precision import QAT
from megatron_lightning.precision.served.qat import qat_of
from megatron_lightning.precision.served.values import NAMES

GOAL = 1.25  # times the plain layer
FORMATS: Mapping[str, QAT] = {"nvfp4": QAT("nvfp4"), "int4": QAT("int4", group_size=32)}
_PAGES = Path(__file__).parents[1] / "docs"
_LENGTH, _ROWS, _BYTES = 64, 16, 256


class Size(NamedTuple):
    """Size of a measurement."""

    features: int = 1024
    tokens: int = 2048
    rounds: int = 15
    seeds: int = 5
    first_steps: int = 300
    further_steps: int = 150


# -------------------------------------------------------------------------------------------- time


def times(size: Size) -> dict[str, list[float]]:
    """Return the processor seconds of each round by format, "plain" first."""
    torch.manual_seed(0)
    x = torch.randn(size.tokens, size.features, requires_grad=True)
    models: dict[str, nn.Module] = {"plain": _layer(size)}
    models |= {name: QAT(name).apply(_layer(size)) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(size.rounds + 1):
        for name, model in models.items():
            start = time.process_time()
            _step(model, x)
            if round_:  # the first warms up
                seconds[name].append(time.process_time() - start)
    return seconds


def _layer(size: Size) -> nn.Module:
    return nn.Sequential(nn.Linear(size.features, size.features, bias=False))


def _step(model: nn.Module, x: Tensor) -> None:
    record = qat_of(model).get("")
    if record is None or record.rounding is None:
        model(x).sum().backward()
        return
    with record.rounding.keeping():
        model(x).sum().backward()
    record.rounding.forget()


# ------------------------------------------------------------------------------------------- worth


def losses(size: Size, seed: int) -> dict[str, float]:
    """Return the held-out losses of a seed: "plain", and of each format "PTQ", "QAT" and "QAD"."""
    torch.manual_seed(seed)
    pages = b"".join(path.read_bytes() for path in sorted(_PAGES.glob("*.md")))
    corpus = torch.frombuffer(bytearray(pages), dtype=torch.uint8).long()
    seen, unseen = corpus[: -len(corpus) // 10], corpus[-len(corpus) // 10 :]
    model = GPTModel(_config())
    _train(model, _batches(seen, size.first_steps, seed), 3e-3, size.first_steps, last=1e-3)
    plain = copy.deepcopy(model)
    further = size.further_steps
    _train(plain, _batches(seen, further, seed + 100), 1e-3, further)
    found = {"plain": _held_out(plain, unseen)}
    for name, qat in FORMATS.items():
        found[f"{name} PTQ"] = _held_out(_rounding(plain, qat), unseen)
        for kind, start, teacher in (("QAT", model, None), ("QAD", plain, plain)):
            student = _rounding(start, qat)
            _train(student, _batches(seen, further, seed + 100), 1e-3, further, teacher=teacher)
            found[f"{name} {kind}"] = _held_out(student, unseen)
    return found


def _config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=_BYTES,
        max_sequence_length=_LENGTH, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def _rounding(model: nn.Module, qat: QAT) -> nn.Module:
    return qat.apply(copy.deepcopy(model))


def _batches(corpus: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(corpus) - _LENGTH - 1, (_ROWS,), generator=draws)
        rows = torch.stack([corpus[i : i + _LENGTH + 1] for i in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def _train(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    rate: float,
    num_steps: int,
    *,
    last: float = 0.0,
    teacher: nn.Module | None = None,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last / rate, num_steps)
    for tokens, labels in batches:
        logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten())
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(tokens).flatten(0, 1).float().log_softmax(-1)
            kind: Any = "batchmean"
            loss = F.kl_div(logits.log_softmax(-1), wanted, reduction=kind, log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _held_out(model: nn.Module, corpus: Tensor) -> float:
    found = [
        F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        for tokens, labels in _batches(corpus, 40, 7)
    ]
    return float(torch.stack(found).mean())


# -------------------------------------------------------------------------------------------- page


def page(seconds: Mapping[str, list[float]], found: list[dict[str, float]], size: Size) -> str:
    """Return the results as a page."""
    ratios: dict[str, Ratio] = {
        name: ratio_of_medians(own, seconds["plain"])
        for name, own in seconds.items()
        if name != "plain"
    }
    lines = [
        f"Forward and backward of a layer of {size.features} x {size.features} on {size.tokens:,} "
        f"tokens, its weight rounded once, relative to the plain layer (goal: at most {GOAL:g}; "
        "one thread, processor time).",
        "",
        "| weights | times plain [95 %] | goal |",
        "| --- | --- | --- |",
        *(f"| {name} | {ratio} | {verdict(ratio.keeps(GOAL))} |" for name, ratio in ratios.items()),
        "",
        f"Held-out losses (nats a byte) of {len(found)} seeds, {size.first_steps} steps and "
        f"{size.further_steps} further ones. A gain is that of a seed over PTQ, and beyond the "
        "spread if its mean exceeds its standard deviation.",
        "",
        "| weights | way | loss | gain over PTQ | beyond the spread |",
        "| --- | --- | --- | --- | --- |",
        f"| fp32 | plain | {_mean(found, 'plain'):.4f} | | |",
    ]
    for name in FORMATS:
        lines.append(f"| {name} | PTQ | {_mean(found, f'{name} PTQ'):.4f} | | |")
        for kind in ("QAT", "QAD"):
            gains = [one[f"{name} PTQ"] - one[f"{name} {kind}"] for one in found]
            spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
            mean = statistics.mean(gains)
            lines.append(
                f"| {name} | {kind} | {_mean(found, f'{name} {kind}'):.4f} | {mean:.4f} +- "
                f"{spread:.4f} | {'yes' if mean > spread else 'no'} |"
            )
    return "\n".join([*lines, ""])


def _mean(found: list[dict[str, float]], name: str) -> float:
    return statistics.mean(one[name] for one in found)


def run(size: Size, folder: Path | None) -> str:
    """Measure, and return the page; with a folder, keep it there."""

    def measured() -> tuple[str, Mapping[str, Any]]:
        seconds = times(size)
        found = [losses(size, seed) for seed in range(size.seeds)]
        return page(seconds, found, size), {"seconds": seconds, "losses": found}

    return measured_page("Weights rounded in training", "served_cpu", measured, folder)


if __name__ == "__main__":
    print_page(__doc__, run, Size(), Size(128, 64, 2, 1, 4, 2))
