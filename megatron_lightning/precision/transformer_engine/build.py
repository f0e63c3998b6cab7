"""Modules of Transformer Engine for our layers, with keyword arguments for each module.

Sizes are sizes of the full layer if Transformer Engine divides the layer (``parallel_mode``). Sizes
are this rank's if the layer computes alone: inside a :class:`ParallelInput` region, for experts, on
one rank. Modules are built on ``meta``, because the layers hold the parameters. Modules with
weights stored as quantized data are built in memory, with quantized tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.linear.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelLinear,
)
from megatron_lightning.layers.losses.linear_loss import TakesLoss
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.precision.transformer_engine.engines import (
    AttentionEngine,
    GroupedEngine,
    LinearEngine,
    NormEngine,
    Surroundings,
)
from megatron_lightning.precision.transformer_engine.library import Library
from megatron_lightning.precision.transformer_engine.random import StreamTracker
from megatron_lightning.precision.transformer_engine.weights import QuantizedWeight

Norm = nn.RMSNorm | nn.LayerNorm


class Shape(NamedTuple):
    """Sizes and ranks of a linear layer in Transformer Engine's terms."""

    in_features: int
    out_features: int
    ranks: dict[str, Any]
    """Keywords ``tp_group``, ``tp_size``, ``sequence_parallel``."""
    parallel_mode: str | None
    sequence_dim: int


class Builder:
    """Builds the engines of layers.

    Args:
        library: Transformer Engine.
        context: Groups of this rank.
        around: The backend.
        weights_recipe: Recipe of the step for weights stored as quantized data, if ranks share
            main params. None: weights are not stored as quantized data.
    """

    def __init__(
        self,
        library: Library,
        context: ParallelContext,
        around: Surroundings,
        weights_recipe: Any = None,
    ) -> None:
        self._te = library.pytorch
        self._tensors = library.tensors
        self._context = context
        self._around = around
        self._weights_recipe = weights_recipe

    def linear(self, layer: Any, recipe: Any = None) -> LinearEngine:
        """Return the engine of a linear layer."""
        shape = shape_of(layer)
        module = self._build(
            self._te.Linear,
            layer,
            recipe,
            (shape.in_features, shape.out_features),
            bias=layer.bias is not None,
            parallel_mode=shape.parallel_mode,
            **shape.ranks,
        )
        return LinearEngine(
            layer, module, lambda: _named(layer), self._around, recipe,
            weights=self._weights(module, {"": layer}, recipe), sequence_dim=shape.sequence_dim,
        )  # fmt: skip

    def norm_linear(self, norm: Norm, layer: Any, recipe: Any = None) -> LinearEngine:
        """Return the engine of a linear layer and the preceding norm."""
        shape = shape_of(layer)
        module = self._build(
            self._te.LayerNormLinear,
            layer,
            recipe,
            (shape.in_features, shape.out_features),
            bias=layer.bias is not None,
            parallel_mode=shape.parallel_mode,
            **shape.ranks,
            **_normalization(norm),
        )
        return LinearEngine(
            layer, module, lambda: _named(norm, "layer_norm_") | _named(layer), self._around,
            recipe, weights=self._weights(module, {"": layer}, recipe),
            sequence_dim=shape.sequence_dim,
        )  # fmt: skip

    def norm_mlp(self, norm: Norm, mlp: MLP, activation: str, recipe: Any = None) -> LinearEngine:
        """Return the engine of a feed-forward layer and the preceding norm.

        ``activation``: Transformer Engine's name of the activation.
        """
        first, second = mlp.linear_fc1, mlp.linear_fc2
        shape = shape_of(first)
        gated = activation == "swiglu"
        module = self._build(
            self._te.LayerNormMLP,
            first,
            recipe,
            (shape.in_features, shape.out_features // 2 if gated else shape.out_features),
            ("init_method", "output_layer_init_method"),
            bias=first.bias is not None,
            activation=activation,
            set_parallel_mode=shape.parallel_mode is not None,
            **shape.ranks,
            **_normalization(norm),
        )
        return LinearEngine(
            mlp, module,
            lambda: _named(norm, "layer_norm_") | _named(first, "fc1_") | _named(second, "fc2_"),
            self._around, recipe,
            weights=self._weights(module, {"fc1_": first, "fc2_": second}, recipe),
            sequence_dim=shape.sequence_dim,
        )  # fmt: skip

    def grouped(self, layer: GroupedLinear, recipe: Any = None) -> GroupedEngine:
        """Return the engine of an expert layer with this rank's experts, possibly sharded in
        width.
        """
        num_experts, out_features, in_features = layer.weight.shape
        module = self._build(
            self._te.GroupedLinear, layer, recipe, (num_experts, in_features, out_features),
            bias=layer.bias is not None,
        )  # fmt: skip

        def parameters() -> dict[str, Tensor]:
            return {
                f"{name}{index}": part
                for name, stacked in _named(layer).items()
                for index, part in enumerate(stacked.unbind())
            }

        return GroupedEngine(
            layer, module, parameters, self._around, recipe,
            weights=self._weights(module, {"": layer}, recipe),
            pad=self._te.Fp8Padding(num_experts), unpad=self._te.Fp8Unpadding(num_experts),
        )  # fmt: skip

    def _build(
        self,
        kind: Any,
        layer: Any,
        recipe: Any,
        sizes: tuple[int, ...],
        initializers: tuple[str, ...] = ("init_method",),
        **keywords: Any,
    ) -> Any:
        """Return a module for ``layer``, either without memory or with quantized weights of zeros.

        Zeros draw no random numbers. The quantized data is later made from the layer's weight.

        ``initializers``: keywords of the weight initializers.
        """
        keywords["params_dtype"] = layer.weight.dtype
        if not self._keeps_quantized(layer):
            return kind(*sizes, device="meta", **keywords)
        keywords |= dict.fromkeys(initializers, nn.init.zeros_)
        recipe = self._weights_recipe if recipe is None else recipe
        with self._te.quantized_model_init(enabled=True, recipe=recipe):
            return kind(*sizes, device=self._context.device, **keywords)

    def _keeps_quantized(self, layer: nn.Module) -> bool:
        context = self._context
        sharing = context.edp if isinstance(layer, GroupedLinear) else context.dp_cp
        return self._weights_recipe is not None and sharing.size > 1

    def _weights(
        self, module: Any, layers: Mapping[str, Any], recipe: Any
    ) -> list[QuantizedWeight]:
        """Return the quantized weights of a module. ``layers``: layers by name prefix."""
        recipe = self._weights_recipe if recipe is None else recipe
        weights = []
        for prefix, layer in layers.items():
            if self._keeps_quantized(layer):
                is_stacked = isinstance(layer, GroupedLinear)
                numbers = range(len(layer.weight)) if is_stacked else ("",)
                names = [f"{prefix}weight{number}" for number in numbers]
                tensors = {name: module._parameters[name] for name in names}
                weights.append(QuantizedWeight(layer, tensors, recipe, self._tensors))
        return weights

    def norm(self, norm: Norm) -> NormEngine:
        """Return the engine of a norm."""
        kind = self._te.RMSNorm if isinstance(norm, nn.RMSNorm) else self._te.LayerNorm
        module = kind(
            norm.normalized_shape[0],
            eps=norm.eps,
            dtype=norm.weight.dtype,
            device="meta",
            zero_centered_gamma=_is_zero_centered(norm),
        )
        return NormEngine(norm, module, lambda: _named(norm), self._around)

    def attention(self, core: CoreAttention) -> AttentionEngine:
        """Return the engine of attention."""

        def build(heads: tuple[int, int], sizes: tuple[int, int], scale: float) -> Any:
            return self._te.DotProductAttention(
                heads[0],  # this rank's: so tp_size is 1
                sizes[0] if sizes[0] == sizes[1] else sizes,
                num_gqa_groups=heads[1],
                attention_dropout=core.dropout.p,
                qkv_format="sbhd",
                attn_mask_type="causal",
                softmax_scale=scale,
                get_rng_state_tracker=self._drawn_from(core),
                **self._shared_sequence(core),
            )

        return AttentionEngine(core, build)

    def _drawn_from(self, core: CoreAttention) -> Any:
        """Return a function that gives Transformer Engine the stream of a dropout.

        None: the default generator.
        """
        dropout = core.dropout
        if dropout.streams is None:
            return None
        tracker = StreamTracker(dropout.streams, dropout.stream_name)
        return lambda: tracker

    def _shared_sequence(self, core: CoreAttention) -> dict[str, Any]:
        """Return the keywords of context parallelism."""
        context = self._context
        if core.cp_comm is None:
            return {}
        group: Any = context.cp.process_group
        if core.cp_comm_type == "a2a+p2p" and context.cp_levels is not None:
            group = [level.process_group for level in context.cp_levels]
        on_gpu = context.device.type == "cuda"
        return {
            "cp_group": group,
            "cp_global_ranks": list(context.cp.ranks),
            "cp_stream": torch.cuda.Stream() if on_gpu else None,  # type: ignore[no-untyped-call]
            "cp_comm_type": core.cp_comm_type,
        }


# ------------------------------------------------------------------------------------------- layers


def shape_of(layer: nn.Module) -> Shape:
    """Return the shape of a linear layer.

    Raises:
        ConfigError: If Transformer Engine has no such layer.
    """
    if isinstance(layer, TakesLoss | VocabParallelLinear):
        raise ConfigError(
            f"{type(layer).__name__} computes the loss in chunks, and Transformer Engine has no "
            "such layer. Keep it in bf16: remove its row from modules of the recipe."
        )
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        group = layer.group
        is_row = isinstance(layer, RowParallelLinear)
        # A layer whose input is copied or sharded elsewhere needs no collective of the engine's.
        if group.size > 1 and (is_row or layer.copy_input or layer.sequence_parallel):
            ranks = {
                "tp_group": group.process_group,
                "tp_size": group.size,
                "sequence_parallel": layer.sequence_parallel,
            }
            dim = layer.sequence_dim if layer.sequence_parallel else 0
            mode = "row" if is_row else "column"
            return Shape(layer.in_features, layer.out_features, ranks, mode, dim)
    elif not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"Transformer Engine has no layer for a {type(layer).__name__}. Keep it in bf16 (a row "
            "in modules of the recipe), or set backend to native or emulation."
        )
    out_features, in_features = layer.weight.shape
    return Shape(in_features, out_features, {}, None, 0)


def check_layer(path: str, layer: Any, scaling: str) -> None:
    """Check that a layer has a counterpart, and its matrices have full tiles.

    Raises:
        ConfigError: If the layer has no counterpart, or a size of this rank's part is not a
            multiple of 16, or of 32 for the formats with small blocks.
    """
    if not isinstance(layer, GroupedLinear):
        shape_of(layer)
    elif layer.gemm.one_by_one:
        raise ConfigError(
            f"{path} multiplies experts one by one (moe.grouped_gemm=False), and backend "
            "'transformer_engine' multiplies all of them at once. Set grouped_gemm to True, or "
            "backend to native or emulation."
        )
    elif layer.bias is not None and layer.num_bias_shares > 1:
        raise ConfigError(
            f"{path} has biases, and the expert_tensor_parallel_size={layer.num_bias_shares} ranks "
            "of an expert each add a share of them, which backend 'transformer_engine' cannot. Set "
            "expert_tensor_parallel_size to 1, or backend to native or emulation."
        )
    multiple = 32 if scaling in ("mxfp8", "nvfp4") else 16
    sizes = tuple(layer.weight.shape[-2:])
    if any(size % multiple for size in sizes):
        raise ConfigError(
            f"{path} multiplies by {sizes[0]} x {sizes[1]}, and with scaling={scaling} Transformer "
            f"Engine quantizes sizes that are multiples of {multiple} on every rank. Change the "
            f"sizes, or keep it in bf16: modules={{{path!r}: 'bf16'}} of the recipe."
        )


def _named(layer: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return weight and bias under Transformer Engine's names."""
    parameters = {name: getattr(layer, name, None) for name in ("weight", "bias")}
    return {prefix + name: value for name, value in parameters.items() if value is not None}


def _normalization(norm: Norm) -> dict[str, Any]:
    kind = "RMSNorm" if isinstance(norm, nn.RMSNorm) else "LayerNorm"
    return {
        "normalization": kind,
        "eps": norm.eps,
        "zero_centered_gamma": _is_zero_centered(norm),
    }


def _is_zero_centered(norm: Norm) -> bool:
    return bool(getattr(norm, "zero_centered", False))
