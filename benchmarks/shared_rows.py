"""Ranks that share the rows of untouched models: bytes kept, multiply-adds, and the start's cost.

    python -m benchmarks.shared_rows           # writes results/
    python -m benchmarks.shared_rows --quick   # a short row of two families: does it run?

Tiny random models of families (``hf_families``), fp32, one row, each beside one process. *Kept*: a
forward's bytes kept for backward on a rank, each storage once, without parameters. *Multiply-adds*
are those of a forward in the modules that mix tokens, as ``torch.utils.flop_counter`` counts them.
*Start*: processor seconds in which what mixes tokens is found and proven, in steps of the same
process, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import hf_families, machine
from benchmarks.command_line import parser_of
from benchmarks.ranks import run
from benchmarks.statistics import verdict
from megatron_lightning.layers.context.ring import RingAttention
from megatron_lightning.layers.shared_rows.entry import SharedRows
from megatron_lightning.layers.shared_rows.mixers import SharingRanks
from megatron_lightning.parallel.grid.context import AxisGroup

KEPT = {"ring": 0.55, "exchange": 0.55, "rows": 0.60, "gather": 0.55}
"""Goals: share of one process's bytes on a rank of two."""
ADDS = {"ring": 0.30, "exchange": 0.30, "rows": 0.30}
"""Goals: share of one process's multiply-adds on a rank of four."""
START_STEPS = 3
FAMILIES = (
    "gpt_oss", "gemma2", "qwen3_5_text", "nemotron_h", "deepseek_v32", "glm_moe_dsa",
    "llama4_text", "deepseek_v4",
)  # fmt: skip


class Counted(NamedTuple):
    """Counts of a rank, or of one process."""

    kept_bytes: int
    adds: int
    """Multiply-adds in modules that mix tokens."""
    kinds: Mapping[str, str]
    start_s: float
    step_s: float


def _kept_bytes(model: nn.Module, tokens: Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens, use_cache=False)
        kept = sum(seen.values())
    del output
    return kept


def _attention_flops(query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, tokens, size = query
    return 4 * batch * heads * tokens * key[2] * size


def _adds(model: nn.Module, tokens: Tensor, paths: Mapping[str, str]) -> int:
    # A block of keys counts in full, also where a kernel leaves half of it out.
    on_cpus = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    counter = FlopCounterMode(display=False, custom_mapping=on_cpus)
    with counter, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    counts = counter.get_flop_counts()
    names = [f"{type(model).__name__}.{path}" for path in paths]
    return sum(sum(counts[name].values()) for name in names if name in counts) // 2


def _step_s(model: nn.Module, tokens: Tensor) -> float:
    begun = time.process_time()
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return time.process_time() - begun


def count(family: str, config: Any, length: int, paths: Mapping[str, str] | None) -> Counted:
    """Return the counts of this rank. ``paths`` of modules that mix tokens: of one process."""
    known = {known.name: known for known in hf_families.families()}
    model = hf_families.build(known[family], config)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, hf_families.VOCABULARY, (1, length), generator=generator)
    if paths is not None:
        kept, adds = _kept_bytes(model, tokens), _adds(model, tokens, paths)
        return Counted(kept, adds, paths, 0.0, _step_s(model, tokens))
    ranks = tuple(range(dist.get_world_size()))
    group = AxisGroup("cp", ranks, dist.get_rank(), dist.group.WORLD)
    shared = SharedRows(SharingRanks(group, RingAttention(group)), (group,), "auto")
    model.register_forward_pre_hook(shared, with_kwargs=True)
    begun = time.process_time()
    shared.find(model)
    start_s = time.process_time() - begun
    part = shared.ranks.part.split(tokens, 1)
    with shared.rows_of(length):
        kept, adds = _kept_bytes(model, part), _adds(model, part, shared.kinds)
        step_s = min(_step_s(model, part) for _ in range(2))
    return Counted(kept, adds, dict(shared.kinds), start_s, step_s)


def measure(family: str, length: int) -> dict[str, Any]:
    """Return the figures of a family, a row of the table."""
    known = {known.name: known for known in hf_families.families()}
    config = hf_families.small_config(known[family])
    config.max_position_embeddings = 2 * length
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            setattr(config, name, length // 4)
    two = run(2, count, family, config, length, None, limit_s=900.0)
    four = run(4, count, family, config, length, None, limit_s=900.0)
    kinds = two[0].kinds
    [one] = run(1, count, family, config, length, kinds, limit_s=900.0)
    names = sorted(set(kinds.values()))
    return {
        "family": family,
        "kinds": ", ".join(f"{name} {list(kinds.values()).count(name)}" for name in names),
        "kept": max(rank.kept_bytes for rank in two) / one.kept_bytes,
        "kept_goal": max(KEPT[name] for name in names),
        "adds": max(rank.adds for rank in four) / one.adds if one.adds else None,
        "adds_goal": None if "gather" in names else max(ADDS[name] for name in names),
        "start": max(rank.start_s / rank.step_s for rank in two),
    }


def page(results: list[dict[str, Any]], length: int) -> str:
    """Return the page of results."""

    def met(value: float | None, goal: float | None) -> str:
        if value is None or goal is None:
            return " | "
        return f"{goal:.2f} | {verdict(value <= goal)}"

    lines = [
        f"Rows of {length} tokens. Windows and chunks are a quarter of a row.",
        "",
        "| family | ways | kept, cp2 | goal |  | multiply-adds, cp4 | goal |  | start, steps "
        f"| goal {START_STEPS} |",
        "| --- " * 10 + "|",
    ]
    for row in results:
        adds = "" if row["adds"] is None else f"{row['adds']:.3f}"
        start = verdict(row["start"] <= START_STEPS)
        lines.append(
            f"| {row['family']} | {row['kinds']} | {row['kept']:.3f} | "
            f"{met(row['kept'], row['kept_goal'])} | {adds} | {met(row['adds'], row['adds_goal'])} "
            f"| {row['start']:.1f} | {start} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write a page of results."""
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    options = parser.parse_args()
    families, length = options.families, options.length
    if options.quick:
        families, length = families[:2], 256
    facts = machine.describe()
    results = []
    for family in families:
        results.append(measure(family, length))
        print(results[-1], flush=True)
    title = f"# Shared rows of untouched models, {facts['date'][:10]}"
    text = f"{title}\n\n{machine.headline(facts)}\n\n{page(results, length)}"
    print(text)
    if not options.quick:
        print(machine.keep(options.results, "shared_rows_cpu", facts, text, {"families": results}))


if __name__ == "__main__":
    main()
