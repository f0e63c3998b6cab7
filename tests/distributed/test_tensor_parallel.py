"""Tensor and sequence parallelism: losses, gradients, logits and initial weights equal those of one
process."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron_lightning.layers.linear import parallel_linear
from megatron_lightning.layers.linear.split_backward import split_backwards
from megatron_lightning.layers.styles import ColumnParallel, RowParallel
from megatron_lightning.models import GPTModel, TransformerConfig
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.parallel.shards.materialize import materialize
from megatron_lightning.parallel.shards.sharding import ShardingPlan, named_shard_specs
from megatron_lightning.pipeline.weight_gradients import WeightGradients
from tests.helpers import oracle_model
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

config_of = partial(tiny_config, init_method_std=0.02)
"""Tolerances here are absolute, for weights of this size."""
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2-tied": {
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    },
    "qwen-uneven-vocabulary": {"qk_layernorm": True, "add_qkv_bias": True, "vocab_size": 51},
}


def tensor_parallel(sequence_parallel: bool) -> ParallelContext:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return ParallelContext(
        ParallelLayout(
            tensor_model_parallel_size=size, sequence_parallel=sequence_parallel and size > 1
        )
    )


def sharded(config: TransformerConfig, context: ParallelContext) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(config)
    parallelize(model, context, model.sharding_plan())
    materialize(model, "cpu")
    return model


def sum_partial_gradients(model: nn.Module, context: ParallelContext) -> None:
    specs = named_shard_specs(model)
    for name, parameter in model.named_parameters():
        if specs[name].partial_over:
            dist.all_reduce(parameter.grad, group=context.tp.process_group)


def global_norm(model: nn.Module, context: ParallelContext) -> Tensor:
    """Return the norm over all ranks of the gradients, each element counted once."""
    specs, square = named_shard_specs(model), torch.zeros(2)
    for name, parameter in model.named_parameters():
        square[0 if specs[name].sharded_over else 1] += parameter.grad.float().square().sum()
    if context.tp.size > 1:
        dist.all_reduce(square[:1], group=context.tp.process_group)
    return square.sum().sqrt()


def several_steps(options: dict[str, Any], sequence_parallel: bool) -> None:
    context, config = tensor_parallel(sequence_parallel), config_of(**options)
    reference, model = GPTModel(config), sharded(config, context)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (reference, model)]
    torch.manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(config.vocab_size, (3, 9))
        inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
        labels[0, :3] = -100
        losses = [m(inputs, labels=labels) for m in (reference, model)]
        # fp32; the ranks' partial sums are added in another order than one process adds: a few
        # roundings of 6e-8.
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(model(inputs), reference(inputs), rtol=1e-5, atol=5e-6)
        for loss in losses:
            loss.mean().backward()
        sum_partial_gradients(model, context)
        specs, expected = named_shard_specs(model), dict(reference.named_parameters())
        assert specs.keys() == expected.keys()
        for name, parameter in model.named_parameters():
            want = specs[name].shard(expected[name].grad)
            error = (parameter.grad - want).norm() / expected[name].grad.norm()
            assert error < 1e-5, f"{name}: relative error {error}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.spread(1)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_equal_one_process(size: int, variant: str, sequence_parallel: bool) -> None:
    run_ranks(size, several_steps, VARIANTS[variant], sequence_parallel)


def steps_as_on_gpus() -> None:
    """Keep the sequence shards of inputs only, which backward gathers again."""
    layers = "megatron_lightning.layers"
    with (
        patch(f"{layers}.linear.column_gemm.keeps_shard", return_value=True) as asked,
        patch(f"{layers}.losses.linear_loss.keeps_shard", return_value=True) as asked_for_losses,
    ):
        several_steps(VARIANTS["llama"], True)
    # Two forwards in 3 steps; two such layers in each block, and the output, once for losses.
    assert asked.call_count == 3 * (2 * 2 * 2 + 1)
    assert asked_for_losses.call_count == 3


def test_steps_of_layers_that_gather_again_equal_one_process() -> None:
    run_ranks(2, steps_as_on_gpus)


@pytest.mark.slow
def test_steps_equal_one_process_on_four_ranks() -> None:
    run_ranks(4, several_steps, VARIANTS["qwen-uneven-vocabulary"], True)


@pytest.mark.spread(1)
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_share_query_groups(groups: int, per_head: bool) -> None:
    """Norms of each head, and of all heads together."""
    norms = {"qk_layernorm": True, "qk_layernorm_per_head": per_head}
    run_ranks(
        4, several_steps, {"num_query_groups": groups, "add_qkv_bias": True} | norms, groups == 1
    )


def one_rank_steps() -> None:
    several_steps(VARIANTS["gpt2-tied"], False)


def test_a_layout_of_one_rank_equals_the_plain_model() -> None:
    one_rank_steps()


def initial_weights(options: dict[str, Any], sequence_parallel: bool) -> None:
    context, config = tensor_parallel(sequence_parallel), config_of(**options)
    whole = dict(GPTModel(config).named_parameters())
    built = GPTModel(config)  # on a real device, then sliced
    for model in (sharded(config, context), parallelize(built, context, built.sharding_plan())):
        for name, spec in named_shard_specs(model).items():
            assert torch.equal(model.get_parameter(name), spec.shard(whole[name].detach())), name


@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_those_of_one_process(size: int) -> None:
    run_ranks(size, initial_weights, VARIANTS["gpt2-tied"] | {"vocab_size": 51}, True)


def user_step() -> None:
    """A user's own cross entropy and accuracy on the model's output, and the gradients through the
    gathered logits."""
    context, config = tensor_parallel(True), config_of()
    reference, model = GPTModel(config), sharded(config, context)
    tokens = torch.arange(36).view(4, 9) % config.vocab_size
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    losses, hits = [], []
    for m in (reference, model):
        logits = m(inputs)
        losses.append(F.cross_entropy(logits.view(-1, config.vocab_size), labels.flatten()))
        hits.append((logits.argmax(-1) == labels).float().mean())
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert hits[0] == hits[1]
    sum_partial_gradients(model, context)
    torch.testing.assert_close(
        global_norm(model, context),
        global_norm(reference, tensor_parallel_none()),
        rtol=1e-5,
        atol=0.0,
    )


def tensor_parallel_none() -> ParallelContext:
    return ParallelContext(ParallelLayout())


def test_a_plain_cross_entropy_and_accuracy_are_right() -> None:
    run_ranks(2, user_step)


def recorded_run(index: int) -> list[tuple[float, float]]:
    """Run a recorded dense run whose data-parallel and pipeline sizes are 1, with plain
    accumulation."""
    args = oracle_model.runs()[index]["args"]
    context = tensor_parallel(args["sp"])
    model = oracle_model.build(args)
    parallelize(model, context, model.sharding_plan())
    optimizer = torch.optim.AdamW(model.parameters(), **oracle_model.ADAM)
    num_micro_batches, result = args["gbs"] // args["mbs"], []
    for step in range(oracle_model.NUM_STEPS):
        total = 0.0
        for micro_batch in range(num_micro_batches):
            tokens, labels = oracle_model.data(args, step, micro_batch)
            loss = model(tokens, labels=labels).mean() / num_micro_batches
            loss.backward()
            total += loss.item()
        sum_partial_gradients(model, context)
        norm = global_norm(model, context)
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, oracle_model.CLIP_NORM / (norm.item() + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        result.append((total, norm.item()))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 3, 4, 8], ids=["single", "tp2", "tp2-sp", "tied"])
def test_megatron_core_run_is_reproduced(index: int) -> None:
    run = oracle_model.runs()[index]
    results = (
        [recorded_run(index)] if run["world"] == 1 else run_ranks(run["world"], recorded_run, index)
    )
    for result in results:
        for (loss, norm), (want_loss, want_norm) in zip(result, run["loss_gradnorm"], strict=True):
            assert loss == pytest.approx(want_loss, abs=1e-6)  # the record's own digits
            # Its layouts differ from each other by 5e-6.
            assert norm == pytest.approx(want_norm, rel=2e-5)


def compiled_and_checkpointed(as_on_gpus: bool) -> None:
    """Compile and recompute a layer, on CPUs or with inputs that backward gathers again."""
    if as_on_gpus:
        parallel_linear.overlaps = lambda x: True  # of this process; a mock cannot be traced
    context, config = tensor_parallel(True), config_of()
    model = sharded(config, context)
    layer = model.decoder.layers["0"]
    hidden = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))

    def gradients(run: Any) -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        y = run(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        return [y.detach(), *grads]

    eager = gradients(layer)
    runs = (
        torch.compile(layer, backend="aot_eager", fullgraph=True),
        lambda x: checkpoint(layer, x, use_reentrant=False),
    )
    for run in runs:
        for actual, expected in zip(gradients(run), eager, strict=True):
            # Equal operations; fusion may reassociate.
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow  # test_a_compiled_layer_puts_off_and_communicates_once compiles as well
@pytest.mark.parametrize("as_on_gpus", [False, True], ids=["cpu", "gather-again"])
def test_a_layer_compiles_whole_and_recomputes(as_on_gpus: bool) -> None:
    run_ranks(2, compiled_and_checkpointed, as_on_gpus)


def split_and_compiled() -> None:
    """Put off weight gradients, uncompiled and compiled; W gathers what the layer has a shard
    of."""
    context, config = tensor_parallel(True), config_of(add_bias_linear=True)
    layer, store = sharded(config, context).decoder.layers["0"], WeightGradients()
    hidden = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(split: bool = True) -> tuple[list[Tensor], Counter[str]]:
        x = hidden.clone().requires_grad_()
        layer.zero_grad()
        with torch.profiler.profile() as profile:
            with store.collect((0, 0)):
                layer(x).square().sum().backward()
            put_off = [
                layer.mlp.linear_fc1.weight.grad is None,
                layer.self_attention.linear_proj.weight.grad is None,
            ]
            assert put_off == [split, split]
            store.compute((0, 0))
        own = (
            "_c10d_functional::",
            "megatron_lightning::all_gather",
            "megatron_lightning::reduce_scatter",
        )
        collectives = Counter(
            event.name for event in profile.events() if event.name.startswith(own)
        )
        return [x.grad, *(parameter.grad for parameter in layer.parameters())], collectives

    whole, _ = step(split=False)
    assert len(split_backwards(layer, store)[0]) == 4
    runs = [step()]
    layer.compile(backend="aot_eager", fullgraph=True)
    step()  # compiles: the collectives of a second, traced run are no collectives
    runs.append(step())
    assert runs[0][1] == runs[1][1] and runs[0][1]["megatron_lightning::all_gather"] > 0
    # It corrupts the heap on gloo.
    assert not any(name.startswith("_c10d_functional::all_gather") for name in runs[0][1])
    for gradients, _ in runs:
        for actual, expected in zip(gradients, whole, strict=True):
            # Equal operations; fusion may reassociate.
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_layer_puts_off_and_communicates_once() -> None:
    run_ranks(2, split_and_compiled)


def autocast_step() -> None:
    context, config = tensor_parallel(True), config_of(add_bias_linear=True)
    reference, model = GPTModel(config), sharded(config, context)
    tokens = torch.arange(36).view(4, 9) % config.vocab_size
    losses = []
    for m in (reference, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(m(tokens[:, :-1], labels=tokens[:, 1:]).mean())
        losses[-1].backward()
    # bf16 has 8 bits: each of the roundings is 4e-3 relative, of logits of order 0.1 beside a loss
    # of 4.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0.0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    sum_partial_gradients(model, context)
    torch.testing.assert_close(
        global_norm(model, context),
        global_norm(reference, tensor_parallel_none()),
        rtol=2e-2,
        atol=0.0,
    )


def test_mixed_precision() -> None:
    run_ranks(2, autocast_step)


def direct_layers() -> None:
    """The public layers without a plan: equal to plain ones made from the same random state."""
    context = tensor_parallel(True)
    group = context.tp
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    want = plain(x)
    torch.manual_seed(3)
    column = ColumnParallelLinear(8, 12, group=group)
    row = RowParallelLinear(12, 8, group=group)
    torch.testing.assert_close(row(F.gelu(column(x))), want, rtol=1e-5, atol=1e-6)
    torch.manual_seed(3)
    column = ColumnParallelLinear(8, 12, group=group, gather_output=True)
    row = RowParallelLinear(12, 8, group=group, input_is_parallel=False)
    torch.testing.assert_close(row(F.gelu(column(x))), want, rtol=1e-5, atol=1e-6)
    torch.manual_seed(4)
    plain_embedding = nn.Embedding(11, 4, padding_idx=2)
    torch.manual_seed(4)
    embedding = VocabParallelEmbedding(11, 4, group=group, padding_idx=2)
    ids = torch.tensor([[0, 2, 10], [5, 6, 2]])
    for e in (plain_embedding, embedding):
        e(ids).square().sum().backward()
    torch.testing.assert_close(embedding(ids), plain_embedding(ids))
    want_grad = embedding.shard_specs["weight"].shard(plain_embedding.weight.grad)
    torch.testing.assert_close(embedding.weight.grad, want_grad)


def test_layers_are_usable_directly() -> None:
    run_ranks(2, direct_layers)


def encoder_layer() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1
    )
    table = ShardingPlan(
        modules={"layers.*.linear1": ColumnParallel(), "layers.*.linear2": RowParallel()},
        sequence_dim=1,
    )
    split = parallelize(copy.deepcopy(plain), tensor_parallel(False), table)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) > torch.tensor([[4], [2]])
    # In inference torch hands the weights of the whole layer to one kernel.
    for training in (True, False):
        with torch.inference_mode(not training):
            expected, found = (
                m.train(training)(x, src_key_padding_mask=padding) for m in (plain, split)
            )
            torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-5, atol=1e-6)


def test_an_encoder_layer_of_torch_is_split_in_inference_too() -> None:
    run_ranks(2, encoder_layer)


def refused() -> list[str]:
    context, messages = tensor_parallel(True), []
    model = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(ShardingError) as groups:
        parallelize(model, context, ShardingPlan(modules={"0": ColumnParallel(num_heads=1)}))
    model = sharded(config_of(), context)
    with pytest.raises(ShardingError) as odd:
        model(torch.zeros(1, 5, dtype=torch.long))
    messages += [str(groups.value), str(odd.value)]
    return messages


def test_what_cannot_be_shared_is_refused() -> None:
    groups, odd = run_ranks(2, refused)[0]
    assert "1 heads" in groups
    assert "5 entries" in odd


def dropout_step(sequence_parallel: bool) -> None:
    context = tensor_parallel(sequence_parallel)
    model = copy.deepcopy(sharded(config_of(hidden_dropout=0.2, attention_dropout=0.2), context))
    tokens = torch.arange(36).view(4, 9) % 64
    torch.manual_seed(0)
    model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    sum_partial_gradients(model, context)
    for name, spec in named_shard_specs(model).items():
        # A mask that differed where activations are replicated would show here.
        if not spec.sharded_over:
            grad = model.get_parameter(name).grad
            first = grad.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(first, grad), name
    default = torch.get_rng_state()
    everyone: list[Any] = [None] * context.tp.size
    dist.all_gather_object(everyone, default)
    assert all(torch.equal(state, default) for state in everyone)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_dropout_keeps_replicated_values_equal(sequence_parallel: bool) -> None:
    run_ranks(2, dropout_step, sequence_parallel)
