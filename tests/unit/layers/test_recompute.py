"""Recomputation on one process: bit-equal losses and gradients, the same random numbers, and the
memory that it says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.errors import ConfigError, RecomputeError
from megatron_lightning.layers.state.recompute import (
    apply_recompute,
    check_patterns,
    remove_recompute,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe, remove_recipe
from tests.helpers.layouts import tiny_config
from tests.helpers.toy_decoder import ToyDecoder

S, B, H, F, LAYERS = 8, 2, 16, 24, 5
FLOAT = 4


def _config(**changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": H,
        "num_attention_heads": 2,
        "ffn_hidden_size": F,
    }
    return tiny_config(**{**sizes, "vocab_size": 20, "init_method_std": 0.2, **changes})


def _options(kind: str) -> RecomputeOptions:
    granularity, _, rest = kind.partition(":")
    if granularity in ("uniform", "block"):
        return RecomputeOptions(
            recompute_granularity="full",
            recompute_method=granularity,
            recompute_num_layers=int(rest),  # type: ignore[arg-type]
        )
    return RecomputeOptions(recompute_granularity="selective", recompute_modules=rest.split(","))


KINDS = [
    "uniform:1", "uniform:2", "block:3", "selective:core_attn", "selective:mlp",
    "selective:layernorm",
    "selective:core_attn,mlp,layernorm", "selective:activation,layernorm",
    "selective:**.self_attention",
]  # fmt: skip


def _tokens() -> Tensor:
    return torch.randint(0, 20, (B, S), generator=torch.Generator().manual_seed(0))


def _step(model: GPTModel) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(7)
    loss = model(_tokens(), labels=_tokens()).mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.detach(), [*gradients, torch.rand(1)]  # the generator ends where it would have


def _with_streams(model: GPTModel) -> RngStreams:
    streams = RngStreams(3, device=torch.device("cpu"))
    for name, module in model.named_modules():
        # Some layers draw from the default generator.
        if name.endswith("dropout") and "layers.1" not in name:
            module.streams = streams  # type: ignore[assignment]
    return streams


@pytest.mark.spread(6)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal(kind: str, dropout: float) -> None:
    model = GPTModel(
        _config(hidden_dropout=dropout, attention_dropout=dropout, normalization="LayerNorm")
    )
    other = copy.deepcopy(model)
    plain_streams, streams = _with_streams(model), _with_streams(other)
    apply_recompute(other, _options(kind))
    for _ in range(2):
        (loss, gradients), (again, others) = _step(model), _step(other)
        assert torch.equal(loss, again)
        assert all(map(torch.equal, gradients, others))
        for name, state in plain_streams.state_dict().items():
            assert torch.equal(streams.state_dict()[name], state)
    assert list(other.state_dict()) == list(model.state_dict())


def _without_positions(num_layers: int = LAYERS) -> GPTModel:
    """Return a model without the table of positions, which all layers share."""
    return GPTModel(_config(num_layers=num_layers, position_embedding_type="none"))


def _saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Return the bytes that the graph keeps, each storage once, parameters left out."""
    storages: dict[int, int] = {}
    kept: list[Any] = []
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that its place is not used again
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        kept.append(model(tokens, labels=tokens).sum())
    return sum(storages.values())


@lru_cache(maxsize=1)
def _baseline() -> tuple[int, int]:
    """Return (bytes of one layer, bytes of the rest), without recomputation."""
    few, many = (_saved_bytes(_without_positions(n), _tokens()) for n in (2, 3))
    return many - few, few - 2 * (many - few)


@pytest.mark.parametrize("kind", ["uniform:1", "uniform:2", "uniform:5", "block:1", "block:3"])
def test_full_recomputation_keeps_the_inputs_of_layers_only(kind: str) -> None:
    layer, rest = _baseline()
    model, count = _without_positions(), int(kind[-1])
    assert _saved_bytes(model, _tokens()) == rest + LAYERS * layer
    apply_recompute(model, _options(kind))
    hidden = S * B * H * FLOAT
    inputs, whole = (
        (count, LAYERS - count) if kind.startswith("block") else (-(-LAYERS // count), 0)
    )
    assert _saved_bytes(model, _tokens()) == rest + inputs * hidden + whole * layer


def test_selective_recomputation_keeps_what_is_left() -> None:
    layer, rest = _baseline()
    hidden, inner = S * B * H * FLOAT, S * B * F * FLOAT
    saved = {}
    for kind in KINDS[3:]:
        model = _without_positions()
        apply_recompute(model, _options(kind))
        saved[kind] = (_saved_bytes(model, _tokens()) - rest) / LAYERS
    # SwiGLU keeps its input (2f) and fc2 its output (f); a norm's output (h) is the next one's
    # input.
    assert saved["selective:mlp"] == layer - 3 * inner
    assert saved["selective:layernorm"] == layer - 2 * hidden
    assert saved["selective:activation,layernorm"] == layer - 2 * hidden - inner
    assert saved["selective:core_attn"] < layer
    attention = layer - saved["selective:core_attn"]
    assert saved["selective:core_attn,mlp,layernorm"] == layer - attention - 3 * inner - 2 * hidden


@pytest.mark.slow
def test_it_can_be_undone_copied_and_pickled() -> None:
    model = GPTModel(_config())
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    expected = _step(model)
    for kind in KINDS:
        apply_recompute(model, _options(kind))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            loss, gradients = _step(other)
            assert torch.equal(loss, expected[0])
            assert all(map(torch.equal, gradients, expected[1]))
            assert all(getattr(p, "grad", None) is None for p in model.parameters())
    remove_recompute(model)
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy])
def test_a_plain_linear_layer_is_quantized_after_it_was_wrapped(copied: Any) -> None:
    """Its class changes then, and plain again later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plain = copy.deepcopy(model)
    options = RecomputeOptions(recompute_granularity="selective", recompute_modules=["0"])
    apply_recompute(model, options)
    model = copied(model)
    x, recipe = torch.randn(4, 32), FP8Recipe(scaling="current")
    before = model(x)
    for module in (model, plain):
        apply_recipe(module, recipe, dtype=torch.float32)
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(model(x), before)
    remove_recipe(model)
    assert torch.equal(model(x), before)


def test_only_the_first_layers_of_each_stage_are_recomputed() -> None:
    model = GPTModel(_config())
    stages = [
        ["embedding", "decoder.layers.0", "decoder.layers.1"],
        ["decoder.layers.3", "decoder.layers.4", "output_layer"],
    ]
    apply_recompute(model, _options("block:1"), stages=stages)
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == [
        "decoder.layers.0", "decoder.layers.3",
    ]  # fmt: skip


class _Blocks(nn.Module):
    """A model of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5), nn.GELU()) for _ in range(3)
        )
        self.log: list[int] = []
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(lambda *_, index=index: self.log.append(index))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _run(model: _Blocks, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    out = model(x).sum()
    return [out.detach(), *torch.autograd.grad(out, list(model.parameters()))]


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_a_model_of_ones_own(granularity: Any) -> None:
    full = {
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_layers": ["**blocks.*"],
    }
    named: dict[str, Any] = (
        full if granularity == "full" else {"recompute_modules": ["blocks.*.0", "blocks.*.2"]}
    )
    options = RecomputeOptions(recompute_granularity=granularity, **named)
    model, x = _Blocks(), torch.randn(3, H)
    expected = _run(model, x)
    check_patterns(
        nn.ModuleDict({"model": model}),
        RecomputeOptions(recompute_granularity="selective", recompute_modules=["blocks"]),
    )
    apply_recompute(model, options)
    assert all(map(torch.equal, _run(model, x), expected))
    assert model.log == [0, 1, 2] * 2  # hooks run once a call
    with torch.no_grad():
        assert model(x).grad_fn is None


def test_frozen_layers_before_trained_ones() -> None:
    model = GPTModel(_config())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("decoder.layers.4"))
    expected = _step(model)[1]
    apply_recompute(model, _options("uniform:2"))
    assert len(expected) > 2
    assert all(map(torch.equal, _step(model)[1], expected))


def test_autocast_is_that_of_the_first_run() -> None:
    model = GPTModel(_config())
    gradients = []
    for kind in (None, "uniform:1", "selective:core_attn,mlp,layernorm"):
        if kind is not None:
            apply_recompute(model, _options(kind))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_tokens(), labels=_tokens()).mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["uniform:1", "selective:core_attn,mlp,layernorm"])
def test_layers_compiled_one_by_one(kind: str) -> None:
    model = GPTModel(_config(num_layers=2))
    apply_recompute(model, _options(kind))
    expected = _step(model)
    for layer in model.decoder.layers.values():
        layer.compile(backend="aot_eager")
    loss, gradients = _step(model)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradients, expected[1])


def test_an_input_changed_in_place_is_an_error() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(H, elementwise_affine=False), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(self.norm(x)).sum()
            with torch.no_grad():
                x.add_(1)
            return out

    model = nn.ModuleDict({"careless": Careless()})
    apply_recompute(
        model, RecomputeOptions(recompute_granularity="selective", recompute_modules=["norm"])
    )
    with pytest.raises(RecomputeError, match="changed in place"):
        model["careless"](torch.randn(2, H)).backward()


def _bad(*modules: str, layers: Sequence[str] = ("layers.*",), **values: Any) -> RecomputeOptions:
    return RecomputeOptions(recompute_modules=modules, recompute_layers=layers, **values)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _bad("core_attn", recompute_granularity="full"),
            "recompute_method=None and recompute_num_layers=None: which",
        ),
        (
            lambda: _bad("core_attn", recompute_granularity="selective", recompute_num_layers=1),
            "choose full layers",
        ),
        (
            lambda: _bad("core_attn", **{**FULL, "recompute_num_layers": 0}),
            "recompute_num_layers is 0",
        ),
        (
            lambda: _bad("core_attn", recompute_granularity="all"),
            "recompute_granularity is 'all', which is unknown",
        ),
        (
            lambda: _bad("core_attn", recompute_method="half"),
            "recompute_method is 'half', which is unknown",
        ),
        (lambda: _bad(recompute_granularity="selective"), "recompute_modules is empty"),
        (lambda: RecomputeOptions(offload_modules="mlp"), "offload_modules='mlp' is no list"),
        (
            lambda: check_patterns(_Blocks(), _bad("moe", recompute_granularity="selective")),
            "'moe' of recompute_modules matches no module of",
        ),
        (
            lambda: check_patterns(_Blocks(), RecomputeOptions(offload_modules=["mlp"])),
            "'mlp' of offload_modules matches",
        ),
        (
            lambda: check_patterns(_Blocks(), _bad("x", **FULL)),
            "match no module of _Blocks. It has lists of modules at 'blocks'. ",
        ),
        (
            lambda: check_patterns(_Blocks(), _bad("x", layers=["blocks.*"], **FULL)),
            "_Blocks runs its layers one by one",
        ),
        (
            lambda: check_patterns(
                GPTModel(_config()), _bad("mpl", recompute_granularity="selective")
            ),
            "Did you mean 'mlp'. Its",
        ),
        (
            lambda: apply_recompute(_Blocks(), _bad("x", layers=["blocks.*"], **FULL)),
            "_Blocks runs its layers one by one",
        ),
    ],
)
def test_contradictions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_offload_changes_nothing_on_the_cpu() -> None:
    model = GPTModel(_config())
    expected = _step(model)
    apply_recompute(
        model, RecomputeOptions(offload_modules=["layers.*", "**.layers.*"], offload_min_bytes=0)
    )
    loss, gradients = _step(model)
    assert torch.equal(loss, expected[0])
    assert all(map(torch.equal, gradients, expected[1]))


@pytest.mark.parametrize(
    "modules", [["self_attn", "norm1"], ["self_attn"]], ids=["dropped", "packed"]
)
def test_attention_on_one_tensor_is_recomputed_inside_other_hooks(modules: list[str]) -> None:
    """Hooks give back a tensor for each of query, key and value, which are one in the first run."""
    ids, model = torch.arange(16).view(2, 8), ToyDecoder(2)

    def losses_and_gradients() -> list[Tensor]:
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            loss = model(ids).square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    plain = losses_and_gradients()
    apply_recompute(
        model, RecomputeOptions(recompute_granularity="selective", recompute_modules=modules)
    )
    assert all(
        torch.equal(one, other) for one, other in zip(losses_and_gradients(), plain, strict=True)
    )
