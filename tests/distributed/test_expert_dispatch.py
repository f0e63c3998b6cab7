"""Dispatch of tokens to the ranks of their experts: outputs, gradients, bytes and memory.

E = experts, h = hidden, f = width of an expert, t = tokens of a rank, k = experts of a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lightning.layers.moe import Routing, route
from megatron_lightning.layers.moe.dispatch import DISPATCHERS, LocalDispatch, TokenOrder
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.styles import ExpertLinear, ExpertParallel, ExpertRouter
from megatron_lightning.parallel import (
    ParallelContext,
    ParallelLayout,
    ShardingPlan,
    collectives,
    parallelize,
)
from tests.helpers.layouts import tiny_config
from tests.helpers.moe import config
from tests.helpers.ranks import run_ranks

HIDDEN, WIDTH, EXPERTS = 6, 10, 8


@dataclass(frozen=True)
class _Case:
    tokens: tuple[int, int, int, int] = (10, 10, 10, 10)
    """Tokens of each rank."""
    options: dict[str, Any] = field(default_factory=dict)
    crowded: bool = False
    """Whether 90 % of the tokens choose expert 1."""
    unused: int = 0
    """Experts, from the last on, that no token chooses."""


CASES = {
    "random": _Case(),
    "another number of tokens on each rank": _Case((7, 0, 12, 3)),
    "one expert a token": _Case(options={"router_topk": 1, "router_pre_softmax": True}),
    "ranks without rows": _Case(unused=6),
    "90 % to one expert": _Case((20, 20, 20, 20), crowded=True),
    "drop by probability": _Case((20, 20, 20, 20), {"expert_capacity_factor": 1.0}, crowded=True),
    "drop by position": _Case(
        options={"expert_capacity_factor": 0.7, "token_drop_policy": "position"}
    ),
    "pad": _Case(
        options={"expert_capacity_factor": 1.2, "pad_expert_input_to_capacity": True}, unused=3
    ),
}
LAYOUTS = {
    "ep2": (2, {"ep": 2}),
    "etp2": (2, {"etp": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2-etp2": (4, {"ep": 2, "etp": 2}),
    "ep2-edp2": (4, {"ep": 2}),
}
# Rounding of the dtype, in sums of another order; fp64 shows that nothing else is in between.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


def _weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    fc1, fc2 = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return fc1, fc2


def _inputs(case: _Case, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Routing]:
    """Return tokens [t, h], the gradient of the outputs [t, h], and the routing of one rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    t = case.tokens[rank]
    tokens, grad = torch.randn(2, t, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    logits = torch.randn(t, EXPERTS, generator=generator, dtype=torch.float64).to(wide)
    logits[:, EXPERTS - case.unused :] -= 100.0
    logits[: t * 9 // 10, 1] += 50.0 if case.crowded else 0.0
    probs, chosen = route(logits, config(num_experts=EXPERTS, **case.options))
    nothing = torch.zeros(())
    return tokens, grad, Routing(probs, chosen, chosen.sum(0), nothing, ())


def _dense(x_th: Tensor, weights_tE: Tensor, fc1_Efh: Tensor, fc2_Ehf: Tensor) -> Tensor:
    """Every expert computes every token."""
    gate, up = torch.einsum("th,efh->tef", x_th, fc1_Efh).chunk(2, dim=-1)
    outputs = torch.einsum("tef,ehf->teh", F.silu(gate) * up, fc2_Ehf)
    return torch.einsum("te,teh->th", weights_tE, outputs)


def _expected(case: _Case, num_ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """Return outputs and gradients of tokens, probabilities and weights, in fp64."""
    ranks = [_inputs(case, rank, dtype) for rank in range(num_ranks)]
    x, grad = (torch.cat([rank[i] for rank in ranks]).double() for i in (0, 1))
    probs = torch.cat([rank[2].probs for rank in ranks]).double()
    chosen = torch.cat([rank[2].chosen for rank in ranks])
    leaves = [x, probs, *(weight.to(dtype).double() for weight in _weights())]
    x, probs, fc1, fc2 = (leaf.requires_grad_() for leaf in leaves)
    out = _dense(x, probs * chosen, fc1, fc2)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _layer(context: ParallelContext, dispatcher: str, dtype: torch.dtype) -> MoELayer:
    sizes = tiny_config(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, vocab_size=8, ffn_hidden_size=WIDTH
    )
    layer = MoELayer(sizes, config(num_experts=EXPERTS, token_dispatcher_type=dispatcher))
    layer.experts.linear_fc1.weight.data, layer.experts.linear_fc2.weight.data = _weights()
    plan = ShardingPlan(
        modules={
            "mlp": ExpertParallel(),
            "mlp.router": ExpertRouter(),
            "mlp.experts.linear_fc1": ExpertLinear(1, num_blocks=2),
            "mlp.experts.linear_fc2": ExpertLinear(2),
        }
    )
    parallelize(nn.ModuleDict({"mlp": layer.to(dtype)}), context, plan)
    return layer


def _context(ep: int = 1, etp: int = 1) -> ParallelContext:
    return ParallelContext(
        ParallelLayout(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    )


def _choices(case: _Case) -> int | None:
    moe = config(num_experts=EXPERTS, **case.options)
    return moe.router_topk if moe.expert_capacity_factor is None else None


def _step(layer: MoELayer, case: _Case, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return outputs, and gradients of tokens, probabilities and this rank's weights."""
    tokens, grad, routing = _inputs(case, rank, dtype)
    leaves = [tokens.requires_grad_(), routing.probs.requires_grad_()]
    layer.zero_grad()
    exchange = layer.dispatcher.begin(routing, _choices(case))
    out = exchange.combine(layer.experts(*exchange.dispatch(tokens)))
    out.backward(grad)
    weights = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    return [out.detach(), *(leaf.grad for leaf in (*leaves, *weights))]


def _run_all(layout: str, dispatcher: str) -> dict[str, list[Any]]:
    """Return the results of this rank; gradients of weights in full, with zeros elsewhere."""
    results = {}
    context = _context(**LAYOUTS[layout][1])
    for dtype in TOLERANCES:
        layer = _layer(context, dispatcher, dtype)
        for name, case in CASES.items():
            found = _step(layer, case, context.rank, dtype)
            again = _step(layer, case, context.rank, dtype)
            assert all(map(torch.equal, found, again)), (name, dtype)
            for index, linear in ((3, layer.experts.linear_fc1), (4, layer.experts.linear_fc2)):
                spec, local = linear.shard_specs["weight"], found[index]
                found[index] = local.new_zeros(spec.global_shape)
                for shard in spec.shards(local):
                    found[index][shard.box.slices] = shard.data
            results[f"{name}, {dtype}"] = [x.double().numpy() for x in found]
    return results


@pytest.mark.spread(1)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in ("ep2", "ep2-etp2") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_outputs_and_gradients_equal_a_dense_reference(layout: str, dispatcher: str) -> None:
    """And two runs are bit-equal."""
    num_ranks = LAYOUTS[layout][0]
    ranks = run_ranks(num_ranks, _run_all, layout, dispatcher)
    for dtype, tolerance in TOLERANCES.items():
        for name, case in CASES.items():
            expected = _expected(case, num_ranks, dtype)
            parts = [rank[f"{name}, {dtype}"] for rank in ranks]
            for index, full in enumerate(expected):
                values = [torch.from_numpy(part[index]) for part in parts]
                found = torch.cat(values) if index < 3 else torch.stack(values).sum(0)
                error = float((found - full).norm() / full.norm())
                assert error <= tolerance, (name, dtype, index)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_a_dense_reference(name: str) -> None:
    for dtype, tolerance in TOLERANCES.items():
        layer = _layer(_context(), "alltoall", dtype)
        assert isinstance(layer.dispatcher, LocalDispatch)
        found = _step(layer, CASES[name], 0, dtype)
        for value, full in zip(found, _expected(CASES[name], 1, dtype), strict=True):
            assert (value.double() - full).norm() <= tolerance * full.norm()


# ------------------------------------------------------------------------------ order of the tokens


def _order_of_rows(layout: str, dispatcher: str, name: str) -> tuple[Any, Any, Any]:
    """Dispatch token numbers, and combine what came."""
    context = _context(**LAYOUTS[layout][1])
    layer = _layer(context, dispatcher, torch.float64)
    _, _, routing = _inputs(CASES[name], context.rank, torch.float64)
    weights = routing.chosen / routing.chosen.sum(1, keepdim=True).clamp(min=1)  # 1 or 1/2
    routing = Routing(weights.double(), *list(vars(routing).values())[1:])
    numbers = 100.0 * context.rank + torch.arange(len(weights), dtype=torch.float64)
    exchange = layer.dispatcher.begin(routing, _choices(CASES[name]))
    rows, counts = exchange.dispatch(numbers[:, None].expand(-1, HIDDEN))
    combined = exchange.combine(rows / context.etp.size)  # as outputs: parts of a sum
    expected = numbers * routing.chosen.any(1)
    assert torch.equal(combined, expected[:, None].expand(-1, HIDDEN))
    chosen = [tokens.nonzero().flatten().tolist() for tokens in routing.chosen.t()]
    return rows[:, 0].tolist(), counts.tolist(), chosen


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["random", "drop by position"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", ["ep2", "ep2-etp2"])
def test_rows_are_sorted_by_expert_and_return_to_their_tokens(
    layout: str, dispatcher: str, name: str
) -> None:
    num_ranks, sizes = LAYOUTS[layout]
    ranks = run_ranks(num_ranks, _order_of_rows, layout, dispatcher, name)
    share, chosen = EXPERTS // sizes["ep"], [tokens for *_, tokens in ranks]
    for rank, (rows, counts, _) in enumerate(ranks):
        first = rank // sizes.get("etp", 1) * share
        expected = [
            [100.0 * source + t for source in range(num_ranks) for t in chosen[source][expert]]
            for expert in range(first, first + share)
        ]
        assert counts == [len(tokens) for tokens in expected]
        assert rows == [token for tokens in expected for token in tokens]


# --------------------------------------------------------------------------------- bytes and memory


def _traffic(layout: str, dispatcher: str, name: str) -> tuple[Any, ...]:
    """Return what this rank hands to collectives, as (phase, kind, elements); the elements of a
    hidden dim in rows that it routes and receives; and the shapes of its weights.
    """
    context, case = _context(**LAYOUTS[layout][1]), CASES[name]
    layer = _layer(context, dispatcher, torch.float32)
    sent: list[tuple[str, str, int]] = []

    def counted(kind: str, run: Any, position: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args[position].is_floating_point():  # not numbers of rows and choices
                sent.append((phase, kind, args[position].numel()))
            return run(*args, **kwargs)

        return call

    dist.all_to_all_single = counted("all-to-all", dist.all_to_all_single, 1)
    collectives.all_gather_start = counted("gather", collectives.all_gather_start, 0)
    collectives.reduce_scatter_start = counted("scatter", collectives.reduce_scatter_start, 0)
    tokens, grad, routing = _inputs(case, context.rank, torch.float32)
    phase = "forward"
    exchange = layer.dispatcher.begin(routing, _choices(case))
    rows, _ = dispatched = exchange.dispatch(tokens.requires_grad_())
    out = exchange.combine(layer.experts(*dispatched))
    phase = "backward"
    out.backward(grad)
    shapes = [tuple(weight.shape) for weight in layer.experts.parameters()]
    return sent, int(routing.chosen.sum()) * HIDDEN, rows.numel(), shapes


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["random", "90 % to one expert", "drop by probability"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in ("ep2", "ep2-etp2") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_an_all_to_all_sends_the_routed_rows_once_each_way(layout: str, name: str) -> None:
    """Experts that compute all tokens everywhere would pass the comparison of results."""
    num_ranks, sizes = LAYOUTS[layout]
    ep, etp = sizes.get("ep", 1), sizes.get("etp", 1)
    ranks = run_ranks(num_ranks, _traffic, layout, "alltoall", name)
    for sent, routed, received, shapes in ranks:
        assert shapes == [
            (EXPERTS // ep, 2 * WIDTH // etp, HIDDEN), (EXPERTS // ep, HIDDEN, WIDTH // etp)
        ]  # fmt: skip
        assert sent == [
            ("forward", "all-to-all", routed * etp),
            ("forward", "all-to-all", received),
            ("backward", "all-to-all", routed * etp),
            ("backward", "all-to-all", received),
        ]
    assert sum(rank[2] for rank in ranks) == sum(rank[1] for rank in ranks) * etp


def test_a_gather_sends_all_tokens_to_all_ranks() -> None:
    tokens = 10 * HIDDEN
    for sent, _, _, shapes in run_ranks(4, _traffic, "ep4", "allgather", "random"):
        assert shapes == [(EXPERTS // 4, 2 * WIDTH, HIDDEN), (EXPERTS // 4, HIDDEN, WIDTH)]
        assert sent == [
            ("forward", "gather", 10 * EXPERTS),  # probabilities
            ("forward", "gather", tokens),
            ("forward", "scatter", 4 * tokens),
            ("backward", "gather", tokens),
            ("backward", "scatter", 4 * tokens),
        ]


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


def _memory(name: str) -> tuple[int, int, int, int]:
    """Return rows routed and received, elements kept for backward, and those of the largest
    tensor."""
    context = _context(ep=4)
    layer = _layer(context, "alltoall", torch.float32)
    tokens, _, routing = _inputs(_MEMORY[name], context.rank, torch.float32)
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // 4
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), _Largest() as largest:
        exchange = layer.dispatcher.begin(routing, 2)
        rows, counts = exchange.dispatch(tokens.requires_grad_())
        out = exchange.combine(layer.experts(rows, counts))
    del out
    return int(routing.chosen.sum()), len(rows), sum(kept.values()), largest.elements


_MEMORY = {"balanced": _Case((400,) * 4), "crowded": _Case((400,) * 4, crowded=True)}


def test_memory_follows_the_rows_that_a_rank_receives() -> None:
    """With 90 % of the tokens on one expert of rank 0."""
    balanced, crowded = (run_ranks(4, _memory, name) for name in _MEMORY)
    # Of a received row: input, gate and up, activation, their product, its number; of a routed one:
    # what returns, its weight, its numbers.
    for routed, received, kept, largest in balanced + crowded:
        assert largest <= max(routed * HIDDEN, received * 2 * WIDTH)
        assert kept <= received * (HIDDEN + 5 * WIDTH) + routed * (HIDDEN + 10)
    assert crowded[0][1] > 1.8 * balanced[0][1]
    # Ranks with few rows need less than before.
    assert crowded[3][2] < balanced[3][2]


# ------------------------------------------------------------------------------------ megatron-core


def test_rows_equal_megatron_cores() -> None:
    """Its permutation of tokens by expert and back (``tests/oracles/moe_router.json``)."""
    path = Path(__file__).parents[1] / "oracles" / "moe_router.json"
    facts = json.loads(path.read_text())["facts"]
    recorded = facts["permute_topk2"]
    probs, chosen = route(torch.tensor(facts["logits"]), config(num_experts=8))
    order = TokenOrder.of(chosen, 2)
    assert order.tokens.tolist() == recorded["sorted_indices"]
    tokens = torch.arange(len(chosen), dtype=torch.float32)[:, None]
    assert order.rows(tokens)[:, 0].tolist() == recorded["permuted_tokens_col0"]
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # as many digits as are recorded
    weights = torch.tensor(recorded["permuted_probs"])
    torch.testing.assert_close(order.weights(probs)[:, 0], weights, **close)
    back = order.sums(order.rows(tokens) * order.weights(probs))[:, 0]
    torch.testing.assert_close(back, torch.tensor(recorded["unpermuted_weighted_col0"]), **close)


@pytest.mark.parametrize("width", [2, None])
def test_rows_of_choices_whose_number_is_known_are_the_same(width: int | None) -> None:
    """Without it, the numbers are read from the device."""
    _, chosen = route(torch.randn(9, 8, generator=torch.Generator().manual_seed(3)), config())
    order, other = (TokenOrder.of(chosen, number) for number in (width, 2))
    for name in ("tokens", "experts", "counts", "by_token", "first"):
        assert torch.equal(getattr(order, name), getattr(other, name)), name


def test_tokens_have_any_number_of_rows() -> None:
    """Those that fill experts up to their capacity have more than k, dropped ones none."""
    moe = config(expert_capacity_factor=2.0, pad_expert_input_to_capacity=True)
    _, chosen = route(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)), moe)
    chosen[5] = False
    num_rows = chosen.sum(1)
    order = TokenOrder.of(chosen, None)
    assert int(num_rows.max()) > 4 and num_rows[5] == 0
    assert order.counts.tolist() == chosen.sum(0).tolist()
    assert torch.equal(order.sums(torch.ones(int(num_rows.sum()), 1))[:, 0], num_rows.float())
