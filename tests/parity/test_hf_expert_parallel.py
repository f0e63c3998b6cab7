"""Untouched ``transformers`` models whose experts are divided over ranks by a table train as on one
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", "5")

import transformers

from megatron_lightning.checkpoint import consolidate
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.styles import DispatchedExperts, Split, TensorParallelExperts
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan, parallelize
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.hf_models import Untouched
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

EP, PP = "expert_model_parallel_size", "pipeline_model_parallel_size"
TP, ETP = "tensor_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {EP: 2}),
    "ep2-ddp": (2, {EP: 2, "data_parallel": "ddp"}),
    "ep2-dp2": (4, {EP: 2}),
    "ep2-dp2-fsdp": (4, {EP: 2, "data_parallel": "fsdp"}),
    "ep2-pp2": (4, {EP: 2, PP: 2, "micro_batch_size": 1}),
    # Without a table: the model's own plans of tensor and expert parallelism.
    "own-ep2": (2, {EP: 2, "sharding_plan": None}),
    "own-ep2-tp2": (2, {EP: 2, TP: 2, ETP: 1, "sharding_plan": None}),
    "own-ep2-tp2-dp2": (4, {EP: 2, TP: 2, ETP: 1, "sharding_plan": None}),
    "own-ep2-tp2-pp2": (
        4, {EP: 2, TP: 2, ETP: 1, PP: 2, "micro_batch_size": 1, "sharding_plan": None},
    ),
    "own-ep2-tp2-fsdp": (
        4, {EP: 2, TP: 2, ETP: 1, "data_parallel": "fsdp", "sharding_plan": None},
    ),
}  # fmt: skip
TABLE = {"model.model.layers.*.mlp.experts": DispatchedExperts()}
DEFAULT = [("mixtral", "ep2"), ("mixtral", "own-ep2-tp2")]
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
    for case in (
        *(("mixtral", name) for name in LAYOUTS),
        *(
            (family, name)
            for family in ("qwen3-moe", "olmoe", "gpt-oss")
            for name in ("ep2", "own-ep2", "own-ep2-tp2")
        ),
    )
]


def _train(
    folder: str, family: str, options: dict[str, Any] | None, replicas: int
) -> tuple[list[float], list[float], list[int]]:
    """Return the loss and gradient norm of every step, and the shape of the first experts."""
    if options is not None:
        plan = ShardingPlan(modules=TABLE, sequence_dim=1)
        options = {"sharding_plan": plan, **options}
    module, loader = Untouched(family), hf_models.loader(family, hf_models.BATCH // replicas)
    run = fit(options, module, loader, max_epochs=1)
    run.trainer.save_checkpoint(f"{folder}/{'one' if options is None else 'parts'}.ckpt")
    experts = next(p for name, p in module.named_parameters() if name.endswith("gate_up_proj"))
    return run.losses, run.norms, list(experts.shape)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_training_equals_one_process(family: str, layout: str, tmp_path: Path) -> None:
    """fp32, sums in another order: 1e-5; a rank's loss is of its own samples."""
    [(losses, norms, full)] = run_ranks(1, _train, str(tmp_path), family, None, 1)
    world, options = LAYOUTS[layout]
    replicas = world // options.get(PP, 1) // options.get(TP, 1)
    ranks = run_ranks(world, _train, str(tmp_path), family, options, replicas)
    mean = torch.tensor([rank[0] for rank in ranks], dtype=torch.float64).mean(0)
    assert mean.tolist() == pytest.approx(losses, rel=1e-5)
    for _, own_norms, shape in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-5)
        assert shape == [full[0] // 2, *full[1:]]
    consolidate(tmp_path / "parts.ckpt", tmp_path / "full.ckpt")
    one, many = (
        torch.load(tmp_path / f"{x}.ckpt", weights_only=True)["state_dict"] for x in ("one", "full")
    )
    assert one.keys() == many.keys()
    for key, value in one.items():
        torch.testing.assert_close(many[key], value, rtol=1e-5, atol=1e-6)


NUM_EXPERTS, NUM_TOKENS, HIDDEN = 4, 6, 8


def _experts(implementation: str = "grouped_mm", width: int = 12) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=width, num_local_experts=NUM_EXPERTS,
        num_attention_heads=2, num_key_value_heads=2, experts_implementation=implementation,
    )  # fmt: skip
    experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def _call(
    experts: nn.Module, rank: int, num_tokens: int = NUM_TOKENS, num_used: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the gradients of tokens and weights; by default experts 2 and 3 get
    none.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator, requires_grad=True)
    weights = torch.rand(num_tokens, 2, generator=generator, requires_grad=True)
    chosen = [torch.randperm(num_used, generator=generator)[:2] for _ in range(num_tokens)]
    index = torch.stack(chosen)
    out = experts(tokens, top_k_index=index, top_k_weights=weights)
    out.square().sum().backward()
    return out.detach(), tokens.grad, weights.grad


def _shards_are_too_narrow_for_torch() -> None:
    """Split experts of 12 features: torch's grouped GEMM takes rows of 48 bytes, and not of 24."""
    context = ParallelContext(ParallelLayout(tensor_model_parallel_size=2))
    divided, full = nn.ModuleDict({"experts": _experts()}), _experts()
    splits = {"gate_up_proj": Split(dim=1, blocks=2), "down_proj": Split(dim=2)}
    plan = ShardingPlan(modules={"experts": TensorParallelExperts(splits)})
    parallelize(divided, context, plan)
    for actual, expected in zip(_call(divided.experts, 0), _call(full, 0), strict=True):
        torch.testing.assert_close(actual, expected)
    assert full.config._experts_implementation == "grouped_mm"  # type: ignore[union-attr]
    # Rows of 4 values have 16 bytes in fp32, and 8 once the precision makes them bf16.
    narrow = nn.ModuleDict({"experts": _experts(width=8)})
    parallelize(narrow, context, plan)
    assert narrow.experts.config._experts_implementation == "eager"


def test_shards_of_experts_may_be_of_any_width() -> None:
    run_ranks(2, _shards_are_too_narrow_for_torch)


def _one_rank_gets_no_token(implementation: str) -> None:
    context = ParallelContext(ParallelLayout(expert_model_parallel_size=2))
    rank, divided = context.ep.rank, nn.ModuleDict({"experts": _experts(implementation)})
    parallelize(divided, context, ShardingPlan(modules={"experts": DispatchedExperts()}))
    full = _experts(implementation)
    for actual, expected in zip(_call(divided.experts, rank), _call(full, rank), strict=True):
        torch.testing.assert_close(actual, expected)
    _call(full, 1 - rank)  # the other rank's tokens, whose gradients add up
    for name, spec in named_shard_specs(divided).items():
        own = name.removeprefix("experts.")
        torch.testing.assert_close(
            divided.get_parameter(name).grad, spec.shard(full.get_parameter(own).grad)
        )


@pytest.mark.spread(1)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_rank_may_get_no_token(implementation: str) -> None:
    run_ranks(2, _one_rank_gets_no_token, implementation)


def _replicated_tokens() -> None:
    layout = {TP: 2, EP: 2, ETP: 1}
    context = ParallelContext(ParallelLayout(**layout))
    divided, full = nn.ModuleDict({"experts": _experts()}), _experts()
    parallelize(divided, context, ShardingPlan(modules={"experts": DispatchedExperts()}))
    for num_tokens in (5, 1):
        found, expected = (
            _call(experts, 7, num_tokens, NUM_EXPERTS) for experts in (divided.experts, full)
        )
        for actual, value in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, value)
        for name, spec in named_shard_specs(divided).items():
            own = full.get_parameter(name.removeprefix("experts."))
            torch.testing.assert_close(divided.get_parameter(name).grad, spec.shard(own.grad))


def test_ranks_divide_the_tokens_that_they_have_in_common() -> None:
    """Also where these are no multiple of the ranks."""
    run_ranks(2, _replicated_tokens)


def _experts_named_twice() -> None:
    context = ParallelContext(ParallelLayout(expert_model_parallel_size=2))
    divided, full = nn.ModuleDict({"experts": _experts()}), _experts()
    parallelize(divided, context, ShardingPlan(modules={"experts": DispatchedExperts()}))
    index = torch.tensor([[0, 0], [3, 1], [2, 2]])
    results = []
    for experts in (divided.experts, full):
        generator = torch.Generator().manual_seed(context.ep.rank)
        tokens = torch.randn(3, HIDDEN, generator=generator, requires_grad=True)
        weights = torch.rand(3, 2, generator=generator, requires_grad=True)
        out = experts(tokens, index, weights)
        results.append((out, *torch.autograd.grad(out.square().sum(), (tokens, weights))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_token_may_name_an_expert_twice() -> None:
    run_ranks(2, _experts_named_twice)


def _apply(module: nn.Module, **layout: int) -> None:
    model = nn.ModuleDict({"experts": module})
    plan = ShardingPlan(modules={"experts": DispatchedExperts()})
    parallelize(model, ParallelContext(ParallelLayout(**layout)), plan)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]),
            r"ModuleList with num_experts=None and 0.weight \[8, 8\].*before 5.*newer transformers",
        ),
        (nn.Linear(8, 8), r"Linear with num_experts=None and weight \[8, 8\]"),
        (nn.Identity(), "Identity with num_experts=None and no parameters"),
    ],
)
def test_older_layouts_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ShardingError, match=f"^experts: style DispatchedExperts.*{message}"):
        _apply(module)


def _fit(family: str, **options: Any) -> None:
    strategy = MegatronStrategy(**options)
    fit = pl.Trainer(strategy=strategy, accelerator="cpu", devices=12, logger=False)
    fit.fit(Untouched(family), hf_models.loader(family))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({TP: 2, EP: 2}, r"^model.model.layers.0.mlp.experts: expert_tensor.* is 2.*\(2\).* to 1"),
        ({EP: 3}, "4 experts are not divisible by expert_model_parallel_size=3"),
    ],
)
@pytest.mark.parametrize("table", [None, ShardingPlan(modules=TABLE, sequence_dim=1)])
def test_layouts_that_do_not_fit_are_refused_before_processes_start(
    layout: dict[str, int], message: str, table: ShardingPlan | None
) -> None:
    with pytest.raises(ShardingError, match=message):
        _fit("mixtral", sharding_plan=table, **layout)


@pytest.mark.parametrize(
    ("family", "layout"), [("llama", {EP: 2}), ("mixtral", {TP: 2, ETP: 1})], ids=str
)
def test_models_without_experts_to_divide(family: str, layout: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"ForCausalLM has none .* _ep_plan.*both sizes unset"):
        _fit(family, **layout)
