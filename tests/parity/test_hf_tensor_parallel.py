"""An unmodified ``transformers`` model, split by a table, equals itself on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import consolidate
from megatron_lightning.models import llama_hf_plan
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers")

LENGTH = 8


def llama_config(**options: Any) -> Any:
    return transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=67,
        max_position_embeddings=32,
        **options,
    )


def batches(vocab_size: int) -> dict[str, dict[str, Tensor]]:
    """Return a full batch, one padded on the right, and one shifted to the right with its
    positions."""
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
    layout = ParallelLayout(
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel
    )
    context = ParallelContext(layout)
    config = llama_config(**options)
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
        torch.testing.assert_close(
            logits[1][kept],
            logits[0][kept],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        for m, y in zip((reference, model), logits, strict=True):
            m.zero_grad()
            F.cross_entropy(y.flatten(0, 1), labels.flatten()).backward()
        expected, specs = dict(reference.named_parameters()), named_shard_specs(model)
        assert specs.keys() == expected.keys()
        for path, parameter in model.named_parameters():
            if specs[path].partial_over:
                dist.all_reduce(parameter.grad)
            error = (parameter.grad - specs[path].shard(expected[path].grad)).norm() / expected[
                path
            ].grad.norm()
            assert error < 1e-5, f"{name}, {path}: relative error {error}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_by_a_table(sequence_parallel: bool, attention: str) -> None:
    options = {
        "num_key_value_heads": 2,
        "attn_implementation": attention,
        "tie_word_embeddings": attention == "eager",
    }
    run_ranks(2, llama_body, sequence_parallel, options)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ranks", "key_value_heads", "sequence_parallel", "attention"),
    [
        pytest.param(4, 1, True, "sdpa"),
        pytest.param(4, 2, False, "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 1, True, "eager"),
                (2, 1, False, "sdpa"),
                (4, 1, False, "eager"),
                (4, 2, True, "sdpa"),
                (4, 4, True, "sdpa"),
            )
        ),
    ],
)
def test_ranks_share_a_key(
    ranks: int, key_value_heads: int, sequence_parallel: bool, attention: str
) -> None:
    options = {
        "num_key_value_heads": key_value_heads,
        "attn_implementation": attention,
        "attention_bias": True,
    }
    run_ranks(ranks, llama_body, sequence_parallel, options)


class _Model(transformers.LlamaForCausalLM):  # type: ignore[misc]
    def sharding_plan(self) -> Any:
        return llama_hf_plan(self.config)


class _Llama(pl.LightningModule):
    def __init__(self, key_value_heads: int) -> None:
        super().__init__()
        self.key_value_heads = key_value_heads

    def configure_model(self) -> None:
        torch.manual_seed(0)
        config = llama_config(
            num_key_value_heads=self.key_value_heads,
            attn_implementation="sdpa",
            initializer_range=0.1,
        )
        self.model = _Model(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def _train(
    folder: str, key_value_heads: int, options: dict[str, Any] | None
) -> tuple[list[float], list[float]]:
    replicas = 1
    if options is not None:
        replicas = dist.get_world_size() // options["tensor_model_parallel_size"]
    text = torch.randint(0, 67, (16, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    loader: Any = DataLoader(text, batch_size=4 // replicas)  # type: ignore[arg-type]
    run = fit(options, _Llama(key_value_heads), loader, max_epochs=1)
    run.trainer.save_checkpoint(f"{folder}/{'one' if options is None else 'parts'}.ckpt")
    return run.losses, run.norms


@pytest.mark.parametrize(
    ("ranks", "tensor", "key_value_heads"),
    [
        pytest.param(4, 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2, 2), (4, 4, 1), (4, 4, 2))
        ),
    ],
)
def test_training_with_shared_keys_equals_one_process(
    ranks: int, tensor: int, key_value_heads: int, tmp_path: Path
) -> None:
    """Losses, the norm of all gradients and the saved weights after four steps; fp32 sums in
    another order."""
    [(losses, norms)] = run_ranks(1, _train, str(tmp_path), key_value_heads, None)
    assert len(norms) == 4
    trained = run_ranks(
        ranks, _train, str(tmp_path), key_value_heads, {"tensor_model_parallel_size": tensor}
    )
    replicas = ranks // tensor
    assert [
        sum(step) / replicas for step in zip(*(own for own, _ in trained[::tensor]), strict=True)
    ] == pytest.approx(losses, rel=1e-5)
    for _, own in trained:
        assert own == pytest.approx(norms, rel=1e-5)
    consolidate(tmp_path / "parts.ckpt", tmp_path / "whole.ckpt")
    whole, one = (
        torch.load(tmp_path / name, weights_only=True)["state_dict"]
        for name in ("whole.ckpt", "one.ckpt")
    )
    assert whole.keys() == one.keys()
    for name, weight in one.items():
        torch.testing.assert_close(
            whole[name], weight, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
