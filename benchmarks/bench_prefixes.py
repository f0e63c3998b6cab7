"""Texts that begin alike, with and without the keys of earlier texts.

    python -m benchmarks.bench_prefixes          # 5 rounds; writes results/
    python -m benchmarks.bench_prefixes --quick  # a tiny model, two rounds

A few-shot evaluation scores four endings of each question, with the same examples before all
questions, a question in each call. A chat is three turns behind a long system prompt, by three
users in turn. Processor seconds of one thread, both engines in turn in one process. Ratios have a
95 % interval, and the goal is for the upper end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.command_line import parser_of
from benchmarks.inference_texts import Sizes, cpu_seconds
from benchmarks.statistics import ratio_of_medians
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.models import GPTModel

GOAL = 0.5
"""Processor time, with kept keys divided by without."""


class Load(NamedTuple):
    """Tokens of the two uses."""

    examples: int = 900
    questions: int = 10
    system: int = 900
    new: int = 16


def fewshot(engine: Engine, load: Load) -> list[float]:
    """Return the scores of four endings of each question."""
    draw = random.Random(0)
    examples = _ids(draw, load.examples)
    found = list[float]()
    with engine.active():
        for _ in range(load.questions):
            question = [*examples, *_ids(draw, 30)]
            scores = engine.score([question] * 4, [_ids(draw, 6) for _ in range(4)])
            found += [score.logprob for score in scores]
    return found


def chat(engine: Engine, load: Load) -> list[int]:
    """Return the ids of three turns of three users."""
    draw, found = random.Random(1), list[int]()
    system = _ids(draw, load.system)
    users = [list(system) for _ in range(3)]
    sampling = Sampling(max_new_tokens=load.new, temperature=0.0)
    with engine.active():
        for _ in range(3):
            for ids in users:
                ids += _ids(draw, 12)
                ((text,),) = engine.generate([ids], sampling)
                ids += text.tokens
                found += text.tokens
    return found


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 500) for _ in range(count)]


USES: Mapping[str, Callable[[Engine, Load], Any]] = {"few-shot scores": fewshot, "chat": chat}


def run(sizes: Sizes, load: Load, rounds: int, results: Path | None) -> str:
    """Measure and return the page.

    Args:
        sizes: Sizes of the model.
        load: Tokens of the uses.
        rounds: Measurements of each engine.
        results: Folder of the page. None: the page is not kept.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts: dict[str, Any] = machine.describe()
    model = GPTModel(sizes.config()).eval()
    rows, numbers = [], dict[str, Any]()
    for use, work in USES.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        found, reused = dict[bool, Any](), 0.0
        for _ in range(rounds + 1):
            for keeps, own in seconds.items():
                engine = Engine.of(model, options=EngineOptions(prefix_cache=keeps))
                spent, found[keeps] = cpu_seconds(lambda e=engine, w=work: w(e, load))  # type: ignore[misc]
                own.append(spent)
                reused = engine.prefix_counts.share if keeps else reused
        kept, plain = (own[1:] for own in seconds.values())  # the first round warms up
        ratio = ratio_of_medians(kept, plain)
        first, second = (torch.tensor(found[keeps]).double() for keeps in (True, False))
        difference = (first - second).abs().max().item()
        met = "met" if ratio.high <= GOAL else "**missed**"
        rows.append(
            f"| {use} | {median(plain):.2f} | {median(kept):.2f} | {ratio} | {GOAL}, {met} | "
            f"{reused:.0%} | {difference:.1e} |"
        )
        numbers[use] = {"kept": kept, "plain": plain, "difference": difference}
    page = "\n".join([
        f"# Texts that begin alike, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)}.",
        "",
        f"A Llama of {sizes.layers} layers, hidden size {sizes.hidden}; {load.examples} tokens of "
        f"examples, {load.system} of a system prompt; {rounds} rounds in turns. Processor seconds.",
        "",
        "| use | without, s | with, s | ratio | goal | prompt tokens reused | largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]) + "\n"  # fmt: skip
    if results is not None:
        machine.keep(results, "prefixes_cpu", facts, page, numbers)
    return page


def main() -> None:
    """Measure, print the page, and keep it."""
    parser = parser_of(__doc__)
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    if options.quick:
        print(run(Sizes(2, 64, 512), Load(64, 2, 64, 4), 2, None))
    else:
        print(run(Sizes(), Load(), options.rounds, options.results))


if __name__ == "__main__":
    main()
