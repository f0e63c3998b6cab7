"""An unmodified ``transformers`` model, split by a table, equals itself on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.models import llama_hf_plan
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.parallel.sharding import named_shard_specs
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers")

LENGTH = 8


def batches(vocab_size: int) -> dict[str, dict[str, Tensor]]:
    """Return a full batch, one padded on the right, and one shifted to the right with its positions."""
    tokens = torch.randint(vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    padded = torch.ones(3, LENGTH, dtype=torch.long)
    padded[0, 5:] = padded[2, 3:] = 0
    shifted = padded.flip(1)
    positions = (shifted.cumsum(1) - 1).clamp(min=0)
    return {
        "full": {"input_ids": tokens},
        "padded": {"input_ids": tokens, "attention_mask": padded},
        "shifted": {"input_ids": tokens, "attention_mask": shifted, "position_ids": positions},
    }


def llama_body(sequence_parallel: bool, options: dict[str, Any]) -> None:
    layout = ParallelLayout(tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel)
    context = ParallelContext(layout)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
        max_position_embeddings=32,
        **options,
    )
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config)
    model = parallelize(copy.deepcopy(reference), context, llama_hf_plan(config))
    for name, batch in batches(config.vocab_size).items():
        labels = batch["input_ids"].roll(-1, 1)
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        logits = [m(**batch, use_cache=False).logits for m in (reference, model)]
        kept = batch.get("attention_mask", torch.ones_like(labels)).bool()
        # fp32, sums in another order: a few roundings of 6e-8 of logits of order 0.1.
        torch.testing.assert_close(logits[1][kept], logits[0][kept], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for m, y in zip((reference, model), logits, strict=True):
            m.zero_grad()
            F.cross_entropy(y.flatten(0, 1), labels.flatten()).backward()
        expected, specs = dict(reference.named_parameters()), named_shard_specs(model)
        assert specs.keys() == expected.keys()
        for path, parameter in model.named_parameters():
            if specs[path].partial_over:
                dist.all_reduce(parameter.grad)
            error = (parameter.grad - specs[path].shard(expected[path].grad)).norm() / expected[path].grad.norm()
            assert error < 1e-5, f"{name}, {path}: relative error {error}"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_by_a_table(sequence_parallel: bool, attention: str) -> None:
    run_ranks(2, llama_body, sequence_parallel, {"attn_implementation": attention, "tie_word_embeddings": attention == "eager"})
