"""Text by the engine beside ``transformers``, the uncached loop, lm-evaluation-harness and itself:
with drafts, behind the server, and on two pipeline stages.

    python -m benchmarks.bench_inference          # 5 rounds; writes results/
    python -m benchmarks.bench_inference --quick  # a tiny model, two rounds: does it run?

One Llama of 46 million parameters, 16 requests with prompts of 8 to 127 tokens and 16 to 95 new
ones, one thread. Times are processor times of one process unless said, in turns. Ratios have a 95 %
interval, and goals are for its lower end (its upper end where less is better). The peers of
``transformers`` are ``generate`` on a left-padded batch, which computes the longest text for all,
and its continuous batching. Tasks: four endings of each document, with loading of model and task.
Serving: all clients and the server in this process, processor time without the clients'. Drafts: a
model with a layer of multi-token prediction whose text follows a permutation of the vocabulary, so
that drafts are accepted.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import inference_pipeline, machine
from benchmarks.command_line import parser_of
from benchmarks.inference_texts import NUM_UNCACHED, Drafts, Sizes, Texts, cpu_seconds
from benchmarks.statistics import Ratio, ratio_of_medians, verdict

GOALS = {"static batch": 1.15, "continuous batching": 1.1}
UNCACHED_GOAL, TASKS_GOAL, SERVING_GOAL, LOGPROBS_GOAL = 10.0, 0.7, 0.9, 1e-5


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def _beside(folder: Path, sizes: Sizes, dtype: torch.dtype, rounds: int) -> tuple[list[Any], Any]:
    """Return rows of the table of texts in a dtype, and the seconds."""
    texts = Texts(folder, sizes, dtype)
    works = {
        "engine": texts.by_engine,
        "static batch": texts.static,
        "continuous batching": texts.continuous,
    }
    if dtype == torch.float32:
        works |= {"uncached": texts.uncached, "engine, short": texts.short}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    found: dict[str, list[list[int]]] = {}
    for _ in range(rounds + 1):
        for name, work in works.items():
            spent, found[name] = cpu_seconds(work)
            seconds[name].append(spent)
    seconds = {name: own[1:] for name, own in seconds.items()}  # the first round warms up
    name_of_dtype = str(dtype).removeprefix("torch.")
    num_tokens = sum(texts.wanted)
    speed = num_tokens / statistics.median(seconds["engine"])
    rows: list[Any] = [[f"{name_of_dtype}, engine", f"{speed:.1f}", "", "", "", ""]]

    def add(name: str, ours: str, goal: float, num_new: int) -> None:
        ratio = ratio_of_medians(seconds[name], seconds[ours])
        equal = sum(a == b for a, b in zip(found[name], found[ours], strict=True))
        speed = f"{num_new / statistics.median(seconds[name]):.1f}"
        kept = verdict(ratio.low >= goal)
        rows.append([f"{name_of_dtype}, {name}", speed, ratio, goal, kept, f"{equal}/16"])

    for name, goal in GOALS.items():
        add(name, "engine", goal, num_tokens)
    numbers: dict[str, Any] = {"seconds": seconds}
    if dtype == torch.float32:
        add("uncached", "engine, short", UNCACHED_GOAL, 16 * NUM_UNCACHED)
        numbers["difference"] = texts.largest_difference()
        numbers["shares"] = texts.product_shares(rounds)
    return rows, numbers


def _drafts(sizes: Sizes, rounds: int) -> tuple[list[Any], Any]:
    """Return rows of the table of drafts, and the seconds."""
    rows, seconds = [], {}
    for count in (1, 16):
        case = Drafts(sizes, count)
        engines = {"plain": case.plain, "drafting": case.drafting}
        own: dict[str, list[float]] = {name: [] for name in engines}
        found: dict[str, Any] = {}
        for _ in range(rounds + 1):
            for name, engine in engines.items():
                spent, found[name] = cpu_seconds(partial(case.texts, engine))
                own[name].append(spent)
        equal = sum(a == b for a, b in zip(found["plain"], found["drafting"], strict=True))
        ratio = ratio_of_medians(own["plain"][1:], own["drafting"][1:])
        steps = case.drafting.num_steps / case.plain.num_steps
        accepted = f"{case.drafting.draft_counts.acceptance:.2f}"
        rows.append([count, ratio, f"{steps:.2f}", accepted, f"{equal}/{count}"])
        seconds[str(count)] = own
    return rows, seconds


def _pipeline(ranks: list[dict[str, list[tuple[float, float]]]]) -> tuple[Ratio, Ratio]:
    """Return the gain of rolling groups by the clock, and by processor time with a core for each
    stage: one group keeps one stage busy at a time, rolling groups keep both.
    """
    walls = {name: [wall for wall, _ in own] for name, own in ranks[0].items()}
    busy = {
        name: [[seconds for _, seconds in rank[name]] for rank in ranks]
        for name in ("one group", "rolling")
    }
    one = [sum(stages) for stages in zip(*busy["one group"], strict=True)]
    rolling = [max(stages) for stages in zip(*busy["rolling"], strict=True)]
    return ratio_of_medians(walls["one group"], walls["rolling"]), ratio_of_medians(one, rolling)


def measure(sizes: Sizes, rounds: int, num_documents: int, results: Path | None) -> str:
    """Measure everything and return the page.

    Args:
        sizes: Sizes of the model.
        rounds: Measurements of each.
        num_documents: Documents of the task.
        results: Folder of the page. None: the page is not kept.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    facts: dict[str, Any] = machine.describe()
    with tempfile.TemporaryDirectory() as name:
        folder = sizes.make_folder(Path(name))
        # First: processes are forked, and nothing has started a thread yet.
        stages = inference_pipeline.measure(folder, sizes.vocabulary, rounds)
        rows, numbers = _beside(folder, sizes, torch.float32, rounds)
        rows_bf16, numbers_bf16 = _beside(folder, sizes, torch.bfloat16, rounds)
        draft_rows, draft_seconds = _drafts(sizes, rounds)
        from benchmarks import inference_uses  # sets variables for the harness

        tasks = inference_uses.task_seconds(str(folder), Path(name), num_documents, rounds)
        serving = inference_uses.serve(str(folder), rounds)
    facts["load_average_at_end"] = machine.describe()["load_average"]
    scored = ratio_of_medians([a for a, _ in tasks], [b for _, b in tasks])
    served = ratio_of_medians([s.alone_busy for s in serving], [s.busy for s in serving])
    served_wall = ratio_of_medians([s.alone_wall for s in serving], [s.wall for s in serving])
    rolling_wall, rolling = _pipeline(stages)
    difference = numbers["difference"]
    shares = [
        [count, f"{1e3 * statistics.median(step for step, _ in own):.1f}",
         ratio_of_medians([products for _, products in own], [step for step, _ in own])]
        for count, own in numbers["shares"].items()
    ]  # fmt: skip
    goals = [
        [f"lm_eval, {num_documents} documents: time over its hf model", scored, f"≤ {TASKS_GOAL}",
         verdict(scored.high <= TASKS_GOAL)],
        ["16 clients: tokens a second over the engine alone, processor time", served,
         f"≥ {SERVING_GOAL}", verdict(served.low >= SERVING_GOAL)],
        ["the same by the clock, clients on the same cores", served_wall, "", ""],
        ["largest difference of a log-probability to the training forward, fp32",
         f"{difference:.1e}", f"≤ {LOGPROBS_GOAL}", verdict(difference <= LOGPROBS_GOAL)],
        ["two stages, groups rolling over one group, a core for each stage", rolling, "", ""],
        ["the same by the clock", rolling_wall, "", ""],
    ]  # fmt: skip
    page = "\n".join(
        [
            f"# Text by the engine, {facts['date'][:10]}",
            "",
            f"{machine.headline(facts)}; transformers {transformers.__version__}.",
            "",
            f"A Llama of {sizes.layers} layers, hidden size {sizes.hidden}, {sizes.vocabulary} "
            f"token ids, 16 requests, {rounds} rounds in turns, one thread. Processor time; ratios "
            "with a 95 % interval, and goals for its worse end.",
            "",
            "## Beside transformers and the uncached loop",
            *_table(["", "tokens/s", "engine is x", "goal", "", "equal texts"], rows + rows_bf16),
            "## Uses",
            *_table(["", "ratio", "goal", ""], goals),
            "## A decode step",
            *_table(["requests", "step, ms", "products with weights, share"], shares),
            "## Drafts by a layer of multi-token prediction",
            *_table(["requests", "x without", "steps", "accepted", "equal texts"], draft_rows),
        ]
    )
    if results is not None:
        kept = {
            "float32": numbers,
            "bfloat16": numbers_bf16,
            "drafts": draft_seconds,
            "tasks": tasks,
            "serving": [own._asdict() for own in serving],
            "stages": stages,
        }
        machine.keep(results, "inference_cpu", facts, page, kept)
    return page


def main() -> None:
    """Measure, print the page, and keep it."""
    parser = parser_of(__doc__, quick="a tiny model and two rounds")
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    if options.quick:
        print(measure(Sizes(2, 64, 512), 2, 4, None))
    else:
        print(measure(Sizes(), options.rounds, 8, options.results))


if __name__ == "__main__":
    main()
