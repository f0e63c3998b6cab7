"""Untouched ``transformers`` models on sequence shards: calls of any length equal one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.hf_plans import transformers_plan
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from tests.helpers import hf_models
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers", "5")

FAMILIES = ["llama-tied", "qwen3", "gemma3", "gpt-neox", "phi3"]


def _tokens(length: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(3, hf_models.VOCABULARY, (2, length), generator=draw)


def _calls() -> dict[str, dict[str, Any]]:
    """Return calls with rows that two ranks can share, and with rows that they cannot."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {
        "even": {"input_ids": _tokens(8)},
        "odd": {"input_ids": _tokens(7)},
        "masked": {"input_ids": _tokens(7), "attention_mask": mask, "position_ids": positions},
        "single": {"input_ids": _tokens(1)},
    }


def _check_gradients(name: str, reference: Any, model: Any, inputs: dict[str, Any]) -> None:
    """fp32; sums in another order, for logits and gradients of order 1."""
    logits = [m(**inputs).logits for m in (reference, model)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    for m, y in zip((reference, model), logits, strict=True):
        m.zero_grad()
        F.cross_entropy(y.flatten(0, 1), inputs["input_ids"].flatten()).backward()
    expected, specs = dict(reference.named_parameters()), named_shard_specs(model)
    for path, parameter in model.named_parameters():
        if specs[path].partial_over:
            dist.all_reduce(parameter.grad)
        gradient = specs[path].shard(expected[path].grad)
        error = (parameter.grad - gradient).norm()
        # A single token attends to itself, so that gradients of queries are roundings of 0.
        assert error <= 1e-5 * gradient.norm() + 1e-6, f"{name}: {path} is off by {error}"


def _body(names: list[str]) -> None:
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=2))
    for name in names:
        reference: Any = hf_models.build(name)
        reference.config.use_cache = True
        plan = transformers_plan(reference, 2)
        assert plan.shards_sequence, plan.why_full_sequence
        model: Any = parallelize(copy.deepcopy(reference), context, plan)
        shapes = set[tuple[int, ...]]()
        block = next(m for p, m in model.named_modules() if p.endswith("layers.1"))
        block.register_forward_hook(
            lambda _, args, out, shapes=shapes: shapes.add(
                tuple(out.shape if isinstance(out, Tensor) else out[0].shape)
            )
        )
        for call, inputs in _calls().items():
            shapes.clear()
            _check_gradients(f"{name}, {call}", reference, model, inputs)
            assert {shape[1] for shape in shapes} == {-(-inputs["input_ids"].shape[1] // 2)}
            with torch.no_grad():
                outs = [m(**inputs, output_hidden_states=True) for m in (reference, model)]
            states = [torch.stack(out.hidden_states) for out in outs]
            torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)
        texts = [
            m.generate(_tokens(4), max_new_tokens=5, do_sample=False, pad_token_id=0)
            for m in (reference, model)
        ]
        assert torch.equal(*texts)
        with pytest.raises(ConfigError, match="asked for hidden states with gradients"):
            model(_tokens(8), output_hidden_states=True)
        with pytest.raises(ConfigError, match="attention_mask for rows of 7 tokens"):
            model(_tokens(7), attention_mask=torch.zeros(1, 1, 7, 7))
        _check_gradients(name, reference, model, _calls()["even"])  # as before the refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    "families",
    [FAMILIES[1:3], [FAMILIES[0], *FAMILIES[3:]]],
    ids=" ".join,
)
def test_calls_of_any_length_equal_one_process(families: list[str]) -> None:
    run_ranks(2, _body, families)
