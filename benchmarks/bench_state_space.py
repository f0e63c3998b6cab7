"""Mamba-2 beside ``transformers``: time of scan and mixer, bytes kept for backward, and a hybrid on
two ranks that share sequences.

    python -m benchmarks.bench_state_space          # 7 rounds; writes results/
    python -m benchmarks.bench_state_space --quick  # short sequences, two rounds: does it run?

Forward and backward, fp32, one thread a process. Times of scan and mixer are processor times of one
process, and ours and theirs take turns. *Kept* is what autograd saves for backward, weights left
out. *Hybrid*: four layers, ``M-M*`` and ``M-M-``, with twice the sequence on two ranks, beside one
process with the single sequence: each rank has as many tokens as the process. Attention has twice
the work on a rank, since work grows with the square; the second pattern shows the other layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.mamba2 import modeling_mamba2

from benchmarks import machine
from benchmarks.command_line import parser_of
from benchmarks.ranks import run
from benchmarks.statistics import ratio_of_medians
from megatron_lightning.assembly.plans import find_plans
from megatron_lightning.config import MambaConfig, TransformerConfig
from megatron_lightning.layers.state_space.mamba import MambaMixer
from megatron_lightning.layers.state_space.scan import chunked_scan
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.parallel.sequence import SequencePart

HEADS, HEAD_DIM, GROUPS, STATE, HIDDEN = 16, 64, 2, 128, 512
CHUNKS = (64, 128, 256)
PATTERNS = ("M-M*", "M-M-")
"""With attention, of which a rank has twice the work of the single length, and without."""
LIMIT = 1.1
"""Longest step of two ranks with twice the sequence, in steps of one process."""


class Pair(NamedTuple):
    """Seconds and kept bytes of ours and of theirs."""

    ours_s: list[float]
    theirs_s: list[float]
    ours_bytes: int
    theirs_bytes: int


def _step(forward: Callable[[], Tensor]) -> tuple[float, int]:
    """Return processor seconds of forward and backward, and the bytes kept for backward."""
    bytes_of_storage: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            bytes_of_storage[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes()
            )
        return tensor

    start = time.process_time()
    with saved_tensors_hooks(keep, lambda saved: saved):
        out = forward()
    out.sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start, sum(bytes_of_storage.values())


def _pair(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int) -> Pair:
    steps = [(_step(ours), _step(theirs)) for _ in range(rounds + 1)][1:]
    ours_s, theirs_s = ([step[i][0] for step in steps] for i in (0, 1))
    return Pair(ours_s, theirs_s, steps[0][0][1], steps[0][1][1])


def measure_scan(length: int, chunk: int, rounds: int) -> Pair:
    """Return the scan's figures. Both kinds get the same leaves."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    x, dt = leaf(1, length, HEADS, HEAD_DIM), leaf(1, length, HEADS)
    b, c = leaf(1, length, GROUPS, STATE), leaf(1, length, GROUPS, STATE)
    a = -torch.linspace(1, 16, HEADS)

    def ours() -> Tensor:
        inputs = (t.transpose(0, 1) for t in (x, nn.functional.softplus(dt)))
        return chunked_scan(*inputs, a, b.transpose(0, 1), c.transpose(0, 1), chunk=chunk)[0]

    def theirs() -> Tensor:
        out = modeling_mamba2.mamba2_chunk_scan(
            x, dt, a, b, c, chunk_size=chunk, D=None, z=None, dt_bias=None, dt_softplus=True
        )
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y

    return _pair(ours, theirs, rounds)


def measure_mixer(length: int, rounds: int, *, recompute: bool) -> Pair:
    """Return the mixer's figures, with the same weights."""
    theirs = modeling_mamba2.Mamba2Mixer(
        modeling_mamba2.Mamba2Config(
            hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, n_groups=GROUPS,
            state_size=STATE, expand=HEADS * HEAD_DIM // HIDDEN, chunk_size=128,
            num_hidden_layers=1, use_bias=False,
        ),
        0,
    ).train()  # fmt: skip
    sizes = MambaConfig(
        num_heads=HEADS, head_dim=HEAD_DIM, num_groups=GROUPS, state_dim=STATE,
        recompute_scan=recompute,
    )  # fmt: skip
    config = TransformerConfig(
        layer_pattern="M", hidden_size=HIDDEN, num_attention_heads=8, vocab_size=64, mamba=sizes
    )
    ours = MambaMixer(config, sizes)
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(0))
    leaf = hidden.requires_grad_()
    return _pair(partial(ours, leaf.transpose(0, 1)), partial(theirs, leaf), rounds)


def _measure_hybrid(
    ranks: int, length: int, rounds: int, pattern: str
) -> list[tuple[float, float]]:
    """Return wall and processor seconds of steps of a hybrid, on each of ``ranks``."""
    config = TransformerConfig(
        layer_pattern=pattern, hidden_size=HIDDEN, num_attention_heads=8, vocab_size=512,
        max_sequence_length=length * ranks,
        mamba=MambaConfig(
            num_heads=HEADS, head_dim=HEAD_DIM, num_groups=GROUPS, state_dim=STATE
        ),
    )  # fmt: skip
    model, layout = GPTModel(config), ParallelLayout(context_parallel_size=ranks)
    context = ParallelContext(layout)
    for path, plan in find_plans(model, None, layout.tp, layout.cp).items():
        parallelize(model.get_submodule(path), context, plan)
    tokens = torch.randint(0, 512, (1, length * ranks), generator=torch.Generator().manual_seed(0))
    part = SequencePart(context.cp.rank, ranks)
    shard, positions = part.split(tokens, 1), part.positions(length * ranks)[None]
    steps = []
    for _ in range(rounds + 1):
        if ranks > 1:
            dist.barrier()
        wall, busy = time.perf_counter(), time.process_time()
        model(shard, labels=shard, position_ids=positions).mean().backward()
        if ranks > 1:
            dist.barrier()
        steps.append((time.perf_counter() - wall, time.process_time() - busy))
    return steps[1:]


def _rows(pairs: dict[str, Pair]) -> list[str]:
    head = ["", "ours ms", "theirs ms", "ratio [95 %]", "ours kept MiB", "theirs", "ratio"]
    rows = [
        [
            name,
            *(f"{1e3 * statistics.median(s):.0f}" for s in (pair.ours_s, pair.theirs_s)),
            str(ratio_of_medians(pair.ours_s, pair.theirs_s)),
            *(f"{size / 2**20:.1f}" for size in (pair.ours_bytes, pair.theirs_bytes)),
            f"{pair.ours_bytes / pair.theirs_bytes:.2f}",
        ]
        for name, pair in pairs.items()
    ]
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]


def measure(length: int, rounds: int, folder: Path | None) -> str:
    """Measure everything and return the page.

    Args:
        length: Tokens of a sequence.
        rounds: Steps of each.
        folder: Folder of the page. None: the page is not kept.
    """
    torch.set_num_threads(1)
    facts: dict[str, Any] = machine.describe()
    pairs = {f"scan, chunks of {chunk}": measure_scan(length, chunk, rounds) for chunk in CHUNKS}
    for recompute in (True, False):
        name = "mixer, scan recomputed" if recompute else "mixer"
        pairs[name] = measure_mixer(length, rounds, recompute=recompute)
    hybrids, lines = {}, []
    for pattern in PATTERNS:
        alone = run(1, _measure_hybrid, 1, length, rounds, pattern, limit_s=900.0)[0]
        shared = run(2, _measure_hybrid, 2, length, rounds, pattern, limit_s=900.0)[0]
        wall, busy = (
            ratio_of_medians([s[i] for s in shared], [s[i] for s in alone]) for i in (0, 1)
        )
        hybrids[pattern] = {"alone": alone, "shared": shared}
        lines.append(
            f"A hybrid {pattern} of {2 * length} tokens on two ranks, in steps of one process with "
            f"{length}: {wall} by the clock, {busy} by processor time of a rank (goal: at most "
            f"{LIMIT}, where each rank has a core)."
        )
    facts["load_average_at_end"] = machine.describe()["load_average"]
    page = "\n".join(
        [
            f"# Mamba-2 beside transformers, {facts['date'][:10]}",
            "",
            f"{machine.headline(facts)}.",
            "",
            f"Sequence {length}, {HEADS} heads of {HEAD_DIM}, {GROUPS} groups, state {STATE}, "
            f"hidden {HIDDEN}, batch 1, {rounds} rounds in turns, one thread; processor time.",
            *_rows(pairs),
            "\n\n".join(lines),
            "",
        ]
    )
    if folder is not None:
        numbers = {
            "pairs": {name: pair._asdict() for name, pair in pairs.items()},
            "hybrids": hybrids,
        }
        machine.keep(folder, "state_space_cpu", facts, page, numbers)
    return page


def main() -> None:
    """Measure, print the page, and keep it."""
    options = parser_of(__doc__, quick="short sequences and two rounds").parse_args()
    if options.quick:
        print(measure(256, 2, None))
    else:
        print(measure(2048, options.rounds, options.results))


if __name__ == "__main__":
    main()
