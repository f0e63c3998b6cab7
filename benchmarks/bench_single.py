"""Training on one device and on two data-parallel processes, compared with a Llama of
``transformers`` in plain Lightning.

    python -m benchmarks.bench_single          # 15 rounds, 15 minutes; writes results/
    python -m benchmarks.bench_single --quick  # a minute, a tiny model: does it run?

Ours is ``GPTModel`` with the defaults of ``MegatronStrategy`` and ``GPTLightningModule``. The peer
has the same sizes and is what most users write: ``LlamaForCausalLM`` (sdpa), ``F.cross_entropy`` on
its logits, ``torch.optim.AdamW`` as it is. Both are measured eager and compiled, ours by
``compile="block"``, the peer as a whole. All variants train in turn, a step each
(``benchmarks.teams``). The peak of a process is compared at a vocabulary that fills it with logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.bench_step import (
    QUICK,
    Comparison,
    Row,
    Steps,
    compare,
    comparison_table,
    rows,
)
from benchmarks.command_line import parser_of
from benchmarks.statistics import verdict
from benchmarks.teams import measure
from benchmarks.variants import Goal, Shape, Variant, ddp, megatron, ours, single_device
from megatron_lightning.config import TransformerConfig
from megatron_lightning.models import GPTModel

Batch = Mapping[str, Tensor]

LARGE_VOCABULARY = 32768
MEMORY_GOAL = 0.8
LOSS_TOLERANCE = 0.02
"""The models draw other initial weights, so that first losses are near ln(vocabulary) only."""


class Llama(pl.LightningModule):
    """A Llama of ``transformers``, trained as in its own examples.

    Args:
        config: Sizes of the model.
        compiled: Whether the model is compiled.
    """

    def __init__(self, config: TransformerConfig, *, compiled: bool = False) -> None:
        super().__init__()
        self.model: Any = self.build(config)
        self.compiled = compiled

    def build(self, config: TransformerConfig) -> nn.Module:
        """Return the model."""
        model: nn.Module = LlamaForCausalLM(llama_config(config))
        return model

    def configure_model(self) -> None:
        """Compile the model, where it is."""
        if self.compiled:
            self.model.compile()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss."""
        logits = self.model(input_ids=batch["tokens"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's AdamW as it is."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def llama_config(config: TransformerConfig) -> LlamaConfig:
    """Return the sizes under the names of ``transformers``."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        max_position_embeddings=config.max_sequence_length,
        tie_word_embeddings=config.share_embeddings_and_output_weights,
        attn_implementation="sdpa",
    )


VARIANTS = (
    ours("single"),
    Variant(name="llama", size=1, strategy=single_device, module=Llama),
    Variant(
        name="single-compiled",
        size=1,
        strategy=partial(megatron, compile="block"),
        ours=True,
    ),
    Variant(
        name="llama-compiled",
        size=1,
        strategy=single_device,
        module=partial(Llama, compiled=True),
    ),
    ours("dp2", dp=2),
    Variant(name="llama-ddp2", size=2, strategy=ddp, module=Llama, data_size=2),
)
GOALS = (
    Goal(ours="single", peer="llama", ratio=1.10),
    Goal(ours="single-compiled", peer="llama-compiled", ratio=1.0),
    Goal(ours="single-compiled", peer="single", ratio=None),
    Goal(ours="dp2", peer="llama-ddp2", ratio=1.0),
)


def check_work(shape: Shape, steps: Steps, peer: Callable[[], nn.Module]) -> None:
    """Check that the variants do the same work.

    Args:
        shape: Sizes.
        steps: What was measured.
        peer: Builds the peer's model.

    Raises:
        RuntimeError: If models have other sizes, or losses that are not those of one task.
    """
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in model.parameters())
            for model in (GPTModel(shape.config), peer())
        ]
    losses = [rank.loss for rounds in steps.values() for rank in rounds[0]]
    spread = max(losses) / min(losses) - 1.0
    if counts[0] != counts[1] or not spread < LOSS_TOLERANCE:
        raise RuntimeError(
            f"the models have {counts[0]} and {counts[1]} parameters, and losses of the first "
            f"measured step between {min(losses):.3f} and {max(losses):.3f} (ln of the vocabulary: "
            f"{math.log(shape.vocab_size):.3f}): they do not do the same work."
        )


def markdown(
    facts: Mapping[str, Any],
    shape: Shape,
    table: Sequence[Row],
    comparisons: Sequence[Comparison],
    peaks: Mapping[str, float],
) -> str:
    """Return the result as a page."""
    mine, peer = peaks["single"], peaks["llama"]
    lines = [
        f"# One device, {facts['date'][:10]}",
        "",
        f"{machine.headline(facts)} (the benchmark itself adds up to 2).",
        "",
        f"{shape.num_layers} layers x {shape.hidden_size}, {shape.num_heads} heads, "
        f"{shape.num_groups} query groups, ffn {shape.ffn_size}, vocabulary {shape.vocab_size}, "
        f"sequence {shape.sequence}, batch {shape.batch}, fp32, clip 1.0, one thread a process. "
        f"{facts['rounds']} rounds in turns; medians.",
        "",
        "| variant | tokens/s | wall s | rank-0 CPU s | peak MiB a rank |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.tokens_per_s:.0f} | {row.wall_s:.3f} | {row.cpu_s:.3f} | "
        f"{row.peak_mib:.0f} |"
        for row in table
    ]
    lines += [
        "",
        *comparison_table(comparisons),
        "",
        f"Peak memory above the imports with a vocabulary of {facts['large_vocabulary']}: ours "
        f"{mine:.0f} MiB, Llama {peer:.0f} MiB, ratio {mine / peer:.2f} (goal at most "
        f"{MEMORY_GOAL}: {verdict(mine <= MEMORY_GOAL * peer)}).",
        "",
    ]
    return "\n".join(lines)


def run(shape: Shape, num_rounds: int, large_vocabulary: int, folder: Path) -> str:
    """Measure, write a JSON and a Markdown file into ``folder``, and return the page."""
    facts = machine.describe()
    steps = measure(VARIANTS, shape, num_rounds, num_dropped=3)
    check_work(shape, steps, lambda: LlamaForCausalLM(llama_config(shape.config)))
    large = measure(VARIANTS[:2], replace(shape, vocab_size=large_vocabulary), 2)
    peaks = {name: rounds[-1][0].peak_bytes / 2**20 for name, rounds in large.items()}
    facts |= {"rounds": num_rounds, "large_vocabulary": large_vocabulary}
    facts["load_average_at_end"] = machine.describe()["load_average"]
    comparisons = [compare(steps, goal) for goal in GOALS]
    page = markdown(facts, shape, rows(steps, shape, None), comparisons, peaks)
    kept: dict[str, Any] = {
        "shape": asdict(shape),
        "peak_mib_with_large_vocabulary": peaks,
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "steps": {
            name: [[rank._asdict() for rank in ranks] for ranks in rounds]
            for name, rounds in steps.items()
        },
    }
    machine.keep(folder, "single_cpu", facts, page, kept)
    return page


def main() -> None:
    """Read the command line and run."""
    options = parser_of(__doc__).parse_args()
    if options.quick:
        print(run(QUICK, 2, 1024, options.results))
    else:
        print(run(Shape(), options.rounds, LARGE_VOCABULARY, options.results))


if __name__ == "__main__":
    main()
