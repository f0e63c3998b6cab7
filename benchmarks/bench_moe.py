"""Mixture of experts: a layer beside a dense one, training beside Mixtral of ``transformers``, and
what the exchange of tokens sends and keeps.

    python -m benchmarks.bench_moe          # 15 rounds, 12 minutes; writes results/
    python -m benchmarks.bench_moe --quick  # a minute, a tiny model: does it run?

fp32, one thread a process; what is compared takes turns. *Layer*: forward and backward of one layer
with experts on one process, beside a dense layer of equal active FLOPs, k times as wide as an
expert. *Training*: ``GPTModel`` with the defaults of ``MegatronStrategy`` and
``GPTLightningModule``, whose AdamW is fused, beside ``MixtralForCausalLM`` in plain Lightning as
most users write it (sdpa, ``F.cross_entropy`` on its logits, ``torch.optim.AdamW`` as it is), with
both implementations of its experts; beside itself with the peer's optimizer (*ep1-unfused*); and on
two processes that share the experts. Models of Mixtral's proportions at two batch sizes, then one
with as many weights in many narrow experts. *Counts*: see ``moe_counts``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks import machine
from benchmarks.bench_single import Llama, check_work
from benchmarks.bench_step import Comparison, Steps, compare, comparison_table, rows
from benchmarks.command_line import parser_of
from benchmarks.moe_counts import (
    PEAK_TOLERANCE,
    Counted,
    count,
    expected_peak_bytes,
    expected_sent_bytes,
)
from benchmarks.ranks import run as run_ranks
from benchmarks.statistics import Ratio, ratio_of_medians, verdict
from benchmarks.teams import measure
from benchmarks.variants import Goal, Shape, Variant, ours, single_device
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy

LAYER_LIMIT = 1.25
"""Time of a layer with experts over that of the dense layer."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape(Shape):
    """Sizes of a model with experts in every layer; the defaults have Mixtral's proportions."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_groups: int = 2
    ffn_size: int = 896
    num_experts: int = 8
    topk: int = 2

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        moe = MoEConfig(num_experts=self.num_experts, router_topk=self.topk)
        return replace(super().config, moe=moe)

    @property
    def flops(self) -> float:
        """Floating-point operations of the model in a training step, of active weights and of the
        router.
        """
        router = 6 * self.tokens * self.num_layers * self.hidden_size * self.num_experts
        return super().flops + router


MIXTRAL = (ExpertShape(batch=2), ExpertShape(batch=8))
"""Eager experts cost most where experts get few tokens, since the gradient of each is added to that
of all."""
FINE_GRAINED = ExpertShape(batch=2, num_experts=32, topk=4, ffn_size=224)
"""Many narrow experts, as in DeepSeek-V2 and OLMoE; as many weights as in ``MIXTRAL``."""
QUICK = ExpertShape(
    num_layers=2, hidden_size=32, num_heads=4, ffn_size=112, vocab_size=128, sequence=32, batch=4
)


class Mixtral(Llama):
    """A Mixtral of ``transformers``, trained as in its own examples.

    Args:
        config: Sizes of the model.
        experts: ``transformers``' name of the implementation of the experts.
    """

    def __init__(self, config: TransformerConfig, *, experts: str) -> None:
        super().__init__(config)
        self.model.set_experts_implementation(experts)

    def build(self, config: TransformerConfig) -> nn.Module:
        """Return the model."""
        model: nn.Module = MixtralForCausalLM(mixtral_config(config))
        return model


def mixtral_config(config: TransformerConfig) -> MixtralConfig:
    """Return the sizes under the names of ``transformers``."""
    moe = config.moe
    if moe is None:
        raise ValueError("the configuration has no experts")
    return MixtralConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.expert_ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        max_position_embeddings=config.max_sequence_length,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.router_topk,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def _experts_over_ranks(shape: Shape) -> Strategy:
    return MegatronStrategy(expert_model_parallel_size=2)


VARIANTS = (
    ours("ep1"),
    replace(ours("ep1-unfused"), module=partial(GPTLightningModule, fused=False)),
    *(
        Variant(
            name=f"mixtral-{experts}",
            size=1,
            strategy=single_device,
            module=partial(Mixtral, experts=experts),
        )
        for experts in ("eager", "grouped_mm")
    ),
    Variant(name="ep2", size=2, strategy=_experts_over_ranks, data_size=2, ours=True),
)
GOALS = (
    Goal(ours="ep1", peer="mixtral-eager", ratio=1.5),
    Goal(ours="ep1", peer="mixtral-grouped_mm", ratio=1.0),
    Goal(ours="ep1-unfused", peer="mixtral-eager", ratio=None),
    Goal(ours="ep1-unfused", peer="mixtral-grouped_mm", ratio=None),
    Goal(ours="ep2", peer="ep1", ratio=None),
)


def layers_of(config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
    """Return a layer with experts, and a dense one of equal active FLOPs."""
    if config.moe is None:
        raise ValueError("the configuration has no experts")
    width = config.moe.router_topk * config.expert_ffn_size
    return MoELayer(config, config.moe), MLP(config, width)


def time_layers(
    config: TransformerConfig, num_tokens: int, num_rounds: int
) -> tuple[list[float], list[float]]:
    """Return seconds of forward and backward of a layer with experts, and of a dense one."""
    layers = layers_of(config)
    tokens, gradient = torch.randn(2, num_tokens, 1, config.hidden_size)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_rounds + 2):
        for layer, found in zip(layers, times, strict=True):
            layer.zero_grad()
            leaf = tokens.detach().requires_grad_()
            start = time.perf_counter()
            layer(leaf).backward(gradient)
            found.append(time.perf_counter() - start)
    return times[0][2:], times[1][2:]


def _layer_lines(shape: ExpertShape, times: tuple[list[float], list[float]]) -> list[str]:
    ratio: Ratio = ratio_of_medians(*times)
    mine, dense = (statistics.median(found) * 1e3 for found in times)
    return [
        f"Layer of {shape.num_experts} experts of {shape.ffn_size}, top {shape.topk}, "
        f"{shape.tokens} tokens: {mine:.0f} ms, dense {dense:.0f} ms, {ratio} times, limit "
        f"{LAYER_LIMIT} {verdict(ratio.keeps(LAYER_LIMIT))}.",
        "",
    ]


@dataclass(frozen=True)
class Training:
    """Steps of all variants, of one shape."""

    shape: ExpertShape
    steps: Steps

    @property
    def comparisons(self) -> list[Comparison]:
        """Ours beside the peers."""
        return [compare(self.steps, goal) for goal in GOALS]

    def lines(self) -> list[str]:
        """Return the lines of a page."""
        shape = self.shape
        return [
            f"Training, {shape.num_experts} experts of {shape.ffn_size}, top {shape.topk}, batch "
            f"{shape.batch}, {shape.tokens} tokens a step:",
            "",
            "| variant | tokens/s | wall s | rank-0 CPU s | peak MiB a rank |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {row.name} | {row.tokens_per_s:.0f} | {row.wall_s:.3f} | {row.cpu_s:.3f} | "
                f"{row.peak_mib:.0f} |"
                for row in rows(self.steps, shape, None)
            ),
            "",
            *comparison_table(self.comparisons),
            "",
        ]

    def numbers(self) -> dict[str, Any]:
        """Return every measurement."""
        return {
            "shape": asdict(self.shape),
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "steps": {
                name: [[rank._asdict() for rank in ranks] for ranks in rounds]
                for name, rounds in self.steps.items()
            },
        }


def train(shape: ExpertShape, num_rounds: int) -> Training:
    """Train all variants in turn."""
    steps = measure(VARIANTS, shape, num_rounds, num_dropped=3)
    check_work(shape, steps, lambda: MixtralForCausalLM(mixtral_config(shape.config)))
    return Training(shape, steps)


def _count_lines(config: TransformerConfig, counts: Mapping[float, Sequence[Counted]]) -> list[str]:
    lines = [
        "Ranks of EP 2, one layer, forward and backward; as bytes, the number and its ratio to "
        "theory:",
        "",
        "| tokens to one expert | rank | rows routed | received | sent | to the byte | peak "
        f"| ±{PEAK_TOLERANCE:.0%} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    balanced = next(iter(counts.values()))
    for share, ranks in counts.items():
        for rank, found in enumerate(ranks):
            sent = expected_sent_bytes(found, config)
            peak = found.peak_bytes / expected_peak_bytes(found, balanced[rank], config)
            lines.append(
                f"| {share:.0%} | {rank} | {found.routed} | {found.received} | {found.sent_bytes}, "
                f"{found.sent_bytes / sent:.3f} | {verdict(found.sent_bytes == sent)} | "
                f"{found.peak_bytes}, {peak:.4f} | {verdict(abs(peak - 1) <= PEAK_TOLERANCE)} |"
            )
    return [*lines, ""]


def run(layer: ExpertShape, shapes: Sequence[ExpertShape], num_rounds: int, folder: Path) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page.

    Args:
        layer: Shape of the layer that is timed and counted by itself.
        shapes: Shapes to train, which differ in experts and batch only.
        num_rounds: Steps of each variant.
        folder: Where the files are written.
    """
    facts: dict[str, Any] = machine.describe()
    config, num_tokens = layer.config, layer.tokens
    (times,) = run_ranks(1, time_layers, config, num_tokens, num_rounds, limit_s=600.0)
    counts = count(config, num_tokens)
    trainings = [train(shape, num_rounds) for shape in shapes]
    facts |= {"rounds": num_rounds, "load_average_at_end": machine.describe()["load_average"]}
    page = "\n".join(
        [
            f"# Mixture of experts, {facts['date'][:10]}",
            "",
            f"{machine.headline(facts)} (the benchmark itself adds up to 2).",
            "",
            f"{layer.num_layers} layers x {layer.hidden_size}, {layer.num_heads} heads, "
            f"{layer.num_groups} query groups, vocabulary {layer.vocab_size}, sequence "
            f"{layer.sequence}, fp32, clip 1.0, one thread a process. {num_rounds} rounds in "
            "turns; medians.",
            "",
            *_layer_lines(layer, times),
            *(line for training in trainings for line in training.lines()),
            *_count_lines(config, counts),
        ]
    )
    kept: dict[str, Any] = {
        "layer": {"shape": asdict(layer), "experts_s": times[0], "dense_s": times[1]},
        "counts": {share: [rank._asdict() for rank in ranks] for share, ranks in counts.items()},
        "trainings": [training.numbers() for training in trainings],
    }
    machine.keep(folder, "moe_cpu", facts, page, kept)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    if options.quick:
        print(run(QUICK, [QUICK], 2, options.results))
    else:
        print(run(MIXTRAL[-1], [*MIXTRAL, FINE_GRAINED], options.rounds, options.results))


if __name__ == "__main__":
    main()
