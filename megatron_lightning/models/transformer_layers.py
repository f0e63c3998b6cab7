"""Layers of a :class:`GPTModel` by kind: transformer layers with attention and feed-forward, and
layers with a single mixer.

Shapes: ``s`` sequence, ``b`` batch, ``h`` hidden. All layers map hidden states [s, b, h] and a
SequenceInfo to [s, b, h].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.layer_kinds import LAYER_KINDS, entry_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.latent_attention import LatentAttention
from megatron_lightning.layers.attention.rotary import RotaryEmbedding
from megatron_lightning.layers.attention.self_attention import SelfAttention
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.norm import build_norm
from megatron_lightning.layers.state_space.delta_net import GatedDeltaNet
from megatron_lightning.layers.state_space.mamba import MambaMixer


def times(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` times a factor of the config."""
    return x if factor == 1.0 else x * factor


def _build_norm(config: TransformerConfig, is_there: bool) -> nn.Module | None:
    return build_norm(config, config.hidden_size) if is_there else None


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


def build_attention(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    """Return the config's attention: grouped, latent or linear."""
    if config.has_linear_attention:
        return _delta_net(config)
    if config.mla is not None and rotary is not None:
        return LatentAttention(config, config.mla, rotary)
    return SelfAttention(config, rotary)


def _delta_net(config: TransformerConfig) -> GatedDeltaNet:
    if config.delta_net is None:
        raise ConfigError("delta_net is not set, and a layer has its mixer. Set delta_net.")
    return GatedDeltaNet(config, config.delta_net)


def build_rotary(config: TransformerConfig) -> RotaryEmbedding | None:
    """Return the config's rotary positions, or None for positions of another kind."""
    if config.position_embedding_type != "rope":
        return None
    return RotaryEmbedding(config.rotary_dim, config.rotary_base, config.rope_scaling)


def _of_experts(sequence: SequenceInfo | None) -> dict[str, Any]:
    """Return the arguments of a layer of experts beside its input."""
    if sequence is None:
        return {}
    arguments = {"routes": sequence.routes, "padding": sequence.padding}
    return {name: value for name, value in arguments.items() if value is not None}


class TransformerLayer(nn.Module):
    """Attention and feed-forward or experts, each added to the residual stream, with a norm before
    (pre-norm), behind, or both, or with one norm before both (parallel).
    """

    def __init__(
        self, config: TransformerConfig, rotary: RotaryEmbedding | None, mlp: nn.Module
    ) -> None:
        super().__init__()
        behind = config.norms_outputs
        self.is_parallel = config.norm_placement == "parallel"
        self.input_layernorm = _build_norm(config, config.norms_inputs)
        self.self_attention = build_attention(config, rotary)
        self.post_self_attn_layernorm = _build_norm(config, behind)
        self.pre_mlp_layernorm = _build_norm(config, config.norms_middle)
        self.mlp = mlp
        self.has_experts = isinstance(mlp, MoELayer)
        self.post_mlp_layernorm = _build_norm(config, behind)
        self.dropout = Dropout(config.hidden_dropout)
        self.multiplier = config.residual_multiplier

    @property
    def read_by(self) -> Mapping[str, str]:
        """Norm -> the only reader of its output, so that both may be computed as one module."""
        if self.is_parallel:
            return {}
        return {"input_layernorm": "self_attention", "pre_mlp_layernorm": "mlp"}

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        normed = _normed(hidden, self.input_layernorm)
        attended = self.self_attention(normed, sequence)
        attended = _normed(attended, self.post_self_attn_layernorm)
        hidden = hidden + self.dropout(times(attended, self.multiplier))
        if not self.is_parallel:
            normed = _normed(hidden, self.pre_mlp_layernorm)
        mapped = self.mlp(normed, **(_of_experts(sequence) if self.has_experts else {}))
        mapped = _normed(mapped, self.post_mlp_layernorm)
        out: Tensor = hidden + self.dropout(times(mapped, self.multiplier))
        return out


class SingleMixerLayer(nn.Module):
    """A mixer with a norm before, added to the residual stream.

    Args:
        config: The model.
        mixer: Maps normed hidden states [s, b, h] to [s, b, h].
    """

    norm_name: ClassVar[str] = "norm"
    """Name of the norm, as Megatron-Core names the norm of such a layer."""
    mixer_name: ClassVar[str] = "mixer"
    reads_sequence: ClassVar[bool] = True
    """Whether the mixer is called with a SequenceInfo."""
    read_by: ClassVar[Mapping[str, str]] = {}
    """Norm -> the only reader of the norm's output, so that both may be computed as one module."""

    def __init__(self, config: TransformerConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.add_module(self.norm_name, build_norm(config, config.hidden_size))
        self.add_module(self.mixer_name, mixer)
        self.dropout = Dropout(config.hidden_dropout)
        self.multiplier = config.residual_multiplier

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        normed = getattr(self, self.norm_name)(hidden)
        mixed = self.mix(getattr(self, self.mixer_name), normed, sequence)
        out: Tensor = hidden + self.dropout(times(mixed, self.multiplier))
        return out

    def mix(self, mixer: nn.Module, normed: Tensor, sequence: SequenceInfo | None) -> Tensor:
        """Return the mixer's output."""
        out: Tensor = mixer(normed, sequence) if self.reads_sequence else mixer(normed)
        return out


class MambaLayer(SingleMixerLayer):
    """Mamba-2."""

    read_by: ClassVar[Mapping[str, str]] = {"norm": "mixer"}


class AttentionLayer(SingleMixerLayer):
    """Attention, or gated delta net, without a feed-forward behind it."""

    norm_name = "input_layernorm"
    mixer_name = "self_attention"
    read_by: ClassVar[Mapping[str, str]] = {"input_layernorm": "self_attention"}


class FeedForwardLayer(SingleMixerLayer):
    """Feed-forward without attention before it."""

    norm_name = "pre_mlp_layernorm"
    mixer_name = "mlp"
    reads_sequence = False
    read_by: ClassVar[Mapping[str, str]] = {"pre_mlp_layernorm": "mlp"}


class ExpertsLayer(FeedForwardLayer):
    """Experts without attention before them."""

    def mix(self, mixer: nn.Module, normed: Tensor, sequence: SequenceInfo | None) -> Tensor:
        """Return the experts' output. ``sequence`` may hold the tokens' routes and padding."""
        out: Tensor = mixer(normed, **_of_experts(sequence))
        return out


def _dense_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return TransformerLayer(config, rotary, MLP(config))


def _experts(config: TransformerConfig) -> nn.Module:
    return MLP(config) if config.moe is None else MoELayer(config, config.moe)


def _expert_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return TransformerLayer(config, rotary, _experts(config))


def _attention_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return AttentionLayer(config, build_attention(config, rotary))


def _delta_net_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return AttentionLayer(config, _delta_net(config))


def _mlp_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return FeedForwardLayer(config, MLP(config))


def _moe_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    return ExpertsLayer(config, _experts(config))


def _mamba_layer(config: TransformerConfig, rotary: RotaryEmbedding | None) -> nn.Module:
    if config.mamba is None:
        raise ConfigError("mamba is not set, and describes layers of the kind mamba. Set it.")
    return MambaLayer(config, MambaMixer(config, config.mamba))


LAYERS: Mapping[str, Callable[[TransformerConfig, RotaryEmbedding | None], nn.Module]]
LAYERS = MappingProxyType(
    {
        "dense": _dense_layer,
        "expert": _expert_layer,
        "attention": _attention_layer,
        "delta_net": _delta_net_layer,
        "mlp": _mlp_layer,
        "moe": _moe_layer,
        "mamba": _mamba_layer,
    }
)
"""Kind of a layer -> build function."""


def build_layer(config: TransformerConfig, rotary: RotaryEmbedding | None, kind: str) -> nn.Module:
    """Return a layer that maps hidden states [s, b, h] and a SequenceInfo to [s, b, h]."""
    return entry_of(kind, LAYERS, "build")(config, rotary)


def build_layers(config: TransformerConfig) -> list[nn.Module]:
    """Return the layers of the model. Layers with equal frequencies share the rotary positions."""
    rotary = dict[tuple[object, ...], RotaryEmbedding | None]()
    layers = []
    num_experts = 0
    for index, kind in enumerate(config.layer_kinds):
        layer_config = config.of_layer(index)
        key = (
            layer_config.position_embedding_type,
            layer_config.rotary_base,
            layer_config.rope_scaling,
        )
        if key not in rotary:
            rotary[key] = build_rotary(layer_config)
        layer = build_layer(layer_config, rotary[key], kind)
        experts = getattr(layer, "mlp", None)
        if isinstance(experts, MoELayer) and kind in LAYER_KINDS:
            experts.number = num_experts
            num_experts += 1
        layers.append(layer)
    return layers


class LayerList(nn.Module):
    """The layers of a depth of multi-token prediction."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})

    def forward(self, hidden: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h]."""
        for layer in self.layers.values():
            hidden = layer(hidden, sequence)
        return hidden


def build_depth(config: TransformerConfig) -> nn.Module:
    """Return the layer, or the layers of a pattern, in a depth of multi-token prediction."""
    layer_config = config.of_layer(config.num_layers - 1)
    rotary = build_rotary(layer_config)
    layers = [build_layer(layer_config, rotary, kind) for kind in config.depth_kinds]
    return layers[0] if config.hybrid is None else LayerList(layers)
