"""Faults that trainings of experts had elsewhere, put into ours: each is found by a check at setup
or in the first step, or by the comparison of gradient norms with one process (``test_experts``).

Other known ones are found by other tests (numbers of Megatron-LM where no project is named):

- a count that the sum over ranks overwrites (7452), losses of padded tokens, an auxiliary loss
  without gradient (NeMo Automodel 1408): ``test_moe_router_module``, ``test_layer_reports``
- auxiliary losses that depend on tensor- or context-parallel ranks where the main loss is of tokens
  (1652, 5047), or on the micro-batch size (5798): ``test_experts``
- a global loss that shrinks with the ranks (3672): ``test_expert_balance``
- padding that is divided over the wrong ranks (7452): ``test_expert_evaluation``
- experts whose etp is not tp, with ep 1 (1628, 6080), gates of shared experts under tensor
  parallelism (Pai-Megatron-Patch 425): ``test_experts``; biases of experts in the norm, with Muon
  (6099): ``test_experts``, ``test_sharded_muon``
- parameters of heads that the norm forgets, such as attention sinks (7452): ``test_hf_untouched``
- gradients of experts without tokens (NeMo Automodel 2995), of probabilities (transformers 48687)
  and doubled ones (pytorch 160285): ``test_expert_dispatch``
- experts that a checkpoint mixes up (FlagScale 1185, megablocks 160): ``test_expert_checkpoints``
- multi-token prediction: the factor of context-parallel ranks (3959), the number of tokens (1532,
  2417), losses reported twice when recomputed (1585): ``test_multi_token_prediction``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.moe import dispatch
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.styles.expert import ExpertRouter
from megatron_lightning.optim import clipping
from megatron_lightning.optim.gradients.data_groups import DataGroups
from megatron_lightning.parallel import ParallelContext, ShardingPlan
from megatron_lightning.parallel.grid.context import ALONE
from megatron_lightning.parallel.shards.spec import ShardSpec, is_writer
from tests.helpers.ranks import run_ranks
from tests.parity.test_experts import EP, ETP, TP, _one, _train

FOUND = 1e-3
"""Smallest relative difference that a fault makes; without one, the runs agree to 1e-5."""


def _no_reduction() -> None:
    """Gradients of experts are not reduced over the ranks that hold the same ones."""
    groups_of = DataGroups.of

    def of(group: Any, *args: Any, **options: Any) -> Any:
        return groups_of(ALONE if group.name == "edp" else group, *args, **options)

    DataGroups.of = of  # type: ignore[method-assign]


def _norm_of_some_experts() -> None:
    """Megatron-LM 5916: experts on other tensor-parallel ranks are left out of the norm."""

    def counts(spec: ShardSpec, context: ParallelContext) -> bool:
        return is_writer(spec, context) and (context.tp.rank == 0 or "tp" in spec.sharded_over)

    clipping.is_writer = counts


def _loss_of_one_rank() -> None:
    """Megatron-LM 5047, 1652: the gradient of the balancing loss depends on the number of
    tensor-parallel ranks.
    """
    total = MoELayer._total

    def scaled(layer: MoELayer, loss: Any) -> torch.Tensor:
        return total(layer, loss) / layer.sharing[0].size

    MoELayer._total = scaled  # type: ignore[method-assign]


def _detached_probabilities() -> None:
    """NeMo Automodel 2995: the gather of the probabilities has no gradient."""
    gather = dispatch.gather_sequence

    def detached(x: torch.Tensor, group: Any) -> torch.Tensor:
        return gather(x.detach() if x.shape[1] == 4 else x, group)  # [t, E]

    dispatch.gather_sequence = detached


SHARED_TOKENS = {TP: 2, ETP: 1, EP: 2}
FAULTS: dict[str, tuple[Callable[[], None], str, int, dict[str, Any]]] = {
    "experts not reduced": (_no_reduction, "softmax", 4, {EP: 2}),
    "norm of some experts": (_norm_of_some_experts, "softmax", 2, SHARED_TOKENS),
    "loss of one rank": (_loss_of_one_rank, "softmax", 2, SHARED_TOKENS),
    "probabilities without gradient": (_detached_probabilities, "gather", 2, {EP: 2}),
}


def _train_with(fault: str | None, name: str, replicas: int) -> Any:
    put, model, _, sizes = FAULTS[name]
    if fault is not None:
        put()
    try:
        losses, norms, _ = _train(model, sizes, replicas)
    except ShardingError:  # replicas are compared when a validation begins
        return [], [float("inf")]
    return losses, norms


def _difference(name: str, fault: str | None) -> float:
    """Return the largest relative difference between gradient norms and those of one process."""
    _, model, world, sizes = FAULTS[name]
    replicas = world // sizes.get(TP, 1)
    _, expected, _ = _one(model, replicas)
    ranks = run_ranks(world, _train_with, fault, name, replicas)
    return max(
        abs(norm / right - 1.0)
        for _, norms in ranks
        for norm, right in zip(norms, expected, strict=False)
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_with_one_process_finds_it(name: str) -> None:
    assert _difference(name, name) > FOUND


def _train_a_router_of_one_rank() -> None:
    """The gradient of the router is that of a tensor-parallel rank's tokens."""
    apply = ExpertRouter.apply

    def without_sum(
        style: ExpertRouter, module: nn.Module, context: ParallelContext, plan: ShardingPlan
    ) -> nn.Module:
        router: Any = apply(style, module, context, plan)
        router.shard_specs = {"weight": ShardSpec.replicated(router.weight.shape)}
        return router

    ExpertRouter.apply = without_sum  # type: ignore[method-assign]
    with pytest.raises(ShardingError, match=r"gradients of 4 .* differ .*mlp\.router\.weight"):
        _train("softmax", SHARED_TOKENS, 1)


def test_routers_of_one_rank_are_refused() -> None:
    """Megatron-LM 599, 619, torchtitan 2387."""
    run_ranks(2, _train_a_router_of_one_rank)


def _train_over_dense_ranks() -> None:
    """With ep 1, gradients of experts would be reduced over the ranks of dense parameters, which
    hold other parts of them.
    """
    ShardSpec.data_axes = property(lambda spec: "dp-cp")  # type: ignore[assignment,method-assign]
    with pytest.raises(ShardingError, match=r"differ between the dp-cp ranks .*experts.linear_fc1"):
        _train("softmax", {ETP: 2}, 2)


def test_experts_of_the_wrong_ranks_are_refused() -> None:
    """Megatron-LM 1628, 5916."""
    run_ranks(2, _train_over_dense_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_without_it_the_runs_agree(name: str) -> None:
    assert _difference(name, None) < 1e-5
