"""What users attach to a layer or a parameter stays where a plan makes the layer parallel, or the
layer is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as new_style
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers import (
    ColumnParallelLinear,
    CrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron_lightning.layers.adapters.adaptable import adapt, restore
from megatron_lightning.layers.linear.gemm import Gemm
from megatron_lightning.layers.linear.parallel_linear import AdaptableLinear
from megatron_lightning.layers.norm import RMSNorm
from megatron_lightning.layers.styles import (
    ColumnParallel,
    HeadsNorm,
    ParameterShards,
    RowParallel,
    SequenceParallel,
    Split,
    TransposedColumnParallel,
    VocabParallel,
    VocabParallelLoss,
)
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan, parallelize
from megatron_lightning.parallel.shards.sharding import Style


def _context(size: int = 2, *, sequence_parallel: bool = False) -> ParallelContext:
    """Return the context of the first of some tensor-parallel ranks, without processes."""
    layout = ParallelLayout(tensor_model_parallel_size=size, sequence_parallel=sequence_parallel)
    return ParallelContext(layout, planned_world_size=size)


def _parallel(module: nn.Module, style: Style, **options: Any) -> nn.Module:
    """Return the child of a model that ``style`` has made parallel."""
    model = nn.Module()
    model.child = module
    rows = {"child": style}
    if options.get("sequence_parallel"):
        model.norm, rows["norm"] = nn.LayerNorm(4), SequenceParallel()
    parallelize(model, _context(**options), ShardingPlan(modules=rows))
    return model.child


class Marker(nn.Linear):
    """Says something of a layer, and computes as one."""

    def purpose(self) -> str:
        return "marked"


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Conv1D(nn.Module):
    """As in transformers: the weight is [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TripledConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "style", "kind"),
    [
        (lambda: nn.Linear(4, 8), ColumnParallel(), ColumnParallelLinear),
        (lambda: nn.Linear(8, 4), RowParallel(), RowParallelLinear),
        (lambda: Marker(4, 8), ColumnParallel(), ColumnParallelLinear),
        (lambda: nn.Embedding(8, 4, padding_idx=1), VocabParallel(), VocabParallelEmbedding),
        (lambda: nn.Linear(4, 8), VocabParallel(), nn.Linear),
        (Conv1D, TransposedColumnParallel(), Conv1D),
        (lambda: RMSNorm(8), HeadsNorm(), nn.RMSNorm),
        (lambda: Conv1D(), ParameterShards({"weight": Split(1)}), Conv1D),
    ],
)
def test_a_layer_stays_the_users_object(
    make: Callable[[], nn.Module], style: Style, kind: type[nn.Module]
) -> None:
    module = make().eval()
    own, weight = type(module), module.weight
    full = weight.detach().clone()
    weight.requires_grad_(False)
    weight.note, module.note = "weight", "module"
    parallel = _parallel(module, style)
    assert parallel is module and isinstance(module, kind) and isinstance(module, own)
    assert module.weight is weight and not weight.requires_grad and not module.training
    assert (weight.note, module.note) == ("weight", "module")
    assert torch.equal(weight, module.shard_specs["weight"].shard(full))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.cpu()))):
        assert type(copied) is type(module) and torch.equal(copied.weight, weight)


def test_methods_of_a_subclass_stay() -> None:
    assert _parallel(Marker(4, 8), ColumnParallel()).purpose() == "marked"
    one, other = (_parallel(Marker(4, 8), ColumnParallel()) for _ in range(2))
    assert type(one) is type(other)  # so that compiled graphs serve both


def test_meta_and_a_live_graph() -> None:
    """Torch remembers the shape of a parameter while a graph of it is alive."""
    layer = nn.Linear(4, 8)
    alive = layer(torch.ones(4))
    _parallel(layer, ColumnParallel(copy_input=False))
    layer.weight.sum().backward()
    assert layer.weight.grad.shape == (4, 4) and alive.shape == (8,)
    assert _parallel(nn.Linear(4, 8, device="meta"), ColumnParallel()).weight.shape == (4, 4)


def test_shared_parameters_stay_one() -> None:
    """Also where models with plans of their own share them."""
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = weight = model["embed"].weight
    model["again"] = model["head"]
    rows = {"embed": VocabParallel(), "head": VocabParallel()}
    parallelize(model, _context(), ShardingPlan(modules=rows), is_full=False)
    assert model["embed"].weight is weight is model["head"].weight and weight.shape == (4, 4)
    assert model["again"] is model["head"]


def test_plain_layers_become_adaptable_and_plain_again() -> None:
    layer, marker = nn.Linear(4, 8), Marker(4, 8)
    gemm, hooks = Gemm(), layer._forward_hooks
    adapt(layer, gemm=gemm, hidden_weight=None)
    assert type(layer) is AdaptableLinear and layer.gemm is gemm
    with pytest.raises(TypeError, match="Marker declares no gemm"):
        adapt(marker, gemm=gemm)
    assert type(marker) is Marker
    restore(layer, "hidden_weight")
    assert type(layer) is AdaptableLinear and layer.gemm is gemm
    restore(layer, "gemm")
    assert type(layer) is nn.Linear and layer._forward_hooks is hooks


def test_an_attribute_of_the_user_is_no_replacement() -> None:
    """Engines are removed from all layers of a module, and other modules may have an `engine`."""
    module = nn.Sequential(nn.LayerNorm(4))
    module.engine = "diesel"
    for layer in module.modules():
        restore(layer, "engine")
    assert module.engine == "diesel"


# ------------------------------------------------------------------------------------------ refused


def _patched() -> nn.Linear:
    layer = nn.Linear(4, 8)
    layer.forward = lambda x: x
    return layer


def _named_group() -> nn.Linear:
    layer = nn.Linear(4, 8)
    layer.group = "decoder"
    return layer


@pytest.mark.parametrize(
    ("make", "style", "message"),
    [
        (lambda: Tripled(4, 8), ColumnParallel(), "class Tripled has a forward of its own"),
        (lambda: Tripled(4, 8), RowParallel(), "class Tripled has a forward of its own"),
        (lambda: Tripled(4, 8), VocabParallel(), "class Tripled has a forward of its own"),
        (TripledConv1D, TransposedColumnParallel(), "class TripledConv1D has a forward"),
        (
            _patched,
            ColumnParallel(),
            "this module has a forward of its own, which would not be called. Leave it out of the "
            "sharding plan: it then stays full on every rank, .* Or move what the forward adds",
        ),
        (lambda: weight_norm(nn.Linear(4, 8)), ColumnParallel(), "computed from other parameters"),
        (lambda: spectral_norm(nn.Linear(4, 8)), RowParallel(), "computed from other parameters"),
        (lambda: new_style.weight_norm(nn.Linear(4, 8)), ColumnParallel(), "computed from other"),
        (lambda: new_style.orthogonal(nn.Linear(4, 8)), VocabParallel(), "computed from other"),
        (
            lambda: prune.l1_unstructured(nn.Linear(4, 8), "weight", 0.5),
            ColumnParallel(),
            "pruning",
        ),
        (
            lambda: new_style.spectral_norm(nn.Embedding(8, 4)),
            VocabParallel(),
            "computed from other parameters",
        ),
        (_named_group, ColumnParallel(), "has an attribute group of its own"),
        (
            lambda: nn.Conv1d(4, 8, 1),
            ColumnParallel(),
            "takes the place of a Linear, .* points it at a Conv1d",
        ),
    ],
)
def test_what_would_be_lost_is_refused(
    make: Callable[[], nn.Module], style: Style, message: str
) -> None:
    module = make()
    shapes = [parameter.shape for parameter in module.parameters()]
    with pytest.raises(ShardingError, match=f"child: .*{message}") as caught:
        _parallel(module, style)
    assert "{" not in str(caught.value)
    assert [parameter.shape for parameter in module.parameters()] == shapes


def _with(name: str, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a module with a hook."""

    def made() -> nn.Module:
        module = make()
        getattr(module, name)(lambda *_: None)
        return module

    return made


def _with_gradient_hook(name: str, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = make()
        getattr(module.weight, name)(lambda *_: None)
        return module

    return made


_COLUMN, _ROW, _WORDS = (
    (lambda: nn.Linear(4, 8)),
    (lambda: nn.Linear(8, 4)),
    (lambda: nn.Embedding(8, 4)),
)


_FORWARD, _BACKWARD = "register_forward_hook", "register_full_backward_hook"
_BEFORE, _BEFORE_BACKWARD = "register_forward_pre_hook", "register_full_backward_pre_hook"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("name", "make", "style", "refused"),
    [
        (_FORWARD, _COLUMN, ColumnParallel(), "tp sp"),
        (_FORWARD, _COLUMN, ColumnParallel(gather_output=True), "sp"),
        (_BEFORE, _COLUMN, ColumnParallel(), "sp"),
        (_BEFORE, _COLUMN, ColumnParallel(copy_input=False), "tp sp"),
        (_BACKWARD, _COLUMN, ColumnParallel(), "tp sp"),
        (_BEFORE_BACKWARD, _COLUMN, ColumnParallel(gather_output=True), ""),
        (_FORWARD, _ROW, RowParallel(), "tp sp"),
        (_BEFORE, _ROW, RowParallel(), "tp sp"),
        (_BEFORE_BACKWARD, _ROW, RowParallel(), "sp"),
        (_FORWARD, _ROW, RowParallel(split_input=True), "sp"),
        (_FORWARD, _WORDS, VocabParallel(), "sp"),
        (_FORWARD, _WORDS, VocabParallel(shard_sequence=False), ""),
        (_FORWARD, CrossEntropy, VocabParallelLoss(8), "tp sp"),
    ],
)
def test_hooks_that_see_a_shard_are_refused(
    name: str,
    make: Callable[[], nn.Module],
    style: Style,
    refused: str,
    sequence_parallel: bool,
) -> None:
    """Under sequence parallelism the inputs of column-parallel layers and the outputs of the
    others are shards, too."""
    module = _with(name, make)()
    if ("sp" if sequence_parallel else "tp") not in refused:
        assert _parallel(module, style, sequence_parallel=sequence_parallel) is module
        return
    with pytest.raises(ShardingError, match=rf"child: this .* has a hook \({name}\), .*shard"):
        _parallel(module, style, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(
    ("make", "style"),
    [
        (_COLUMN, ColumnParallel(gather_output=True)),
        (_ROW, RowParallel()),
        (_WORDS, VocabParallel()),
        (Conv1D, TransposedColumnParallel()),
        (Conv1D, ParameterShards({"weight": Split(1)})),
    ],
)
def test_hooks_of_split_parameters_are_refused(
    name: str, make: Callable[[], nn.Module], style: Style
) -> None:
    with pytest.raises(ShardingError, match="child: weight has a gradient hook"):
        _parallel(_with_gradient_hook(name, make)(), style)


@pytest.mark.parametrize(
    ("module", "style"),
    [
        (nn.Linear(4, 7), ColumnParallel()),
        (nn.Linear(7, 4), RowParallel()),
        (nn.Embedding(1, 4), VocabParallel()),
    ],
)
def test_a_layer_that_cannot_be_divided_is_unchanged(module: nn.Module, style: Style) -> None:
    own, attributes = type(module), dict(vars(module))
    with pytest.raises(ShardingError, match="child: "):
        _parallel(module, style)
    assert type(module) is own and vars(module) == attributes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"words": VocabParallel(), "last": ColumnParallel()}, "last: .* has a forward of its own"),
        ({"words": VocabParallel()}, "head.weight and words.weight were one parameter"),
    ],
)
def test_parameters_stay_tied_after_an_error(rows: dict[str, Style], message: str) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = weight = model["words"].weight
    model["last"] = Tripled(4, 8)
    with pytest.raises(ShardingError, match=message):
        parallelize(model, _context(), ShardingPlan(modules=rows))
    assert model["head"].weight is model["words"].weight is weight


def test_a_hook_of_a_full_parameter_stays() -> None:
    """The bias of a row-parallel layer is not split."""
    layer, seen = nn.Linear(8, 4), list[torch.Size]()
    layer.bias.register_hook(lambda grad: seen.append(grad.shape))
    _parallel(layer, RowParallel())
    layer.bias.sum().backward()
    assert seen == [(4,)]
