"""Maximal update parametrization (μP, https://arxiv.org/abs/2203.03466): the learning rate of a
narrow model serves a wide one. With depth, CompleteP (https://arxiv.org/abs/2505.01618).

A dim *grows* by m = size / base size. What changes with m, for Adam and for SGD:

    parameter      dims that grow      Adam: lr   SGD: lr     initial std   forward
    hidden         fan-in, fan-out     1/m        out/in      1/sqrt(m)
    input          fan-out             1          m           1
    output         fan-in              1          m           0             logits / m
    vector         its only dim        1          m           1

Weight decay is decoupled: its product with the learning rate stays. Adam's epsilon shrinks with the
gradients, by 1/m. Muon's update of a hidden matrix needs no factor (``adjust_lr_fn="original"``),
or 1/sqrt(m) where it is scaled as AdamW's. With L = depth / base depth, blocks enter the residual
stream by 1/L, and epsilon of the parameters in blocks shrinks by another 1/L.

An output without a factor in its forward is an equal parametrization with the factor in the weight:
Adam's learning rate 1/m, SGD's 1/m, epsilon 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError

Kind = Literal["adam", "sgd", "muon"]
Growth = Sequence[float]
"""Factor of each dim of a parameter, relative to the base model."""

_KINDS: Mapping[type[Optimizer], Kind] = {
    **dict.fromkeys((Adam, AdamW, NAdam, RAdam, Adamax), "adam"),
    SGD: "sgd",
    Muon: "muon",
}
_SIZES = ("base_width", "base_depth", "base_head_dim")
_INPUT, _OUTPUT = "embedding.", "output_layer.weight"
_FIXED_OUT = ("router.weight", "shared_expert_gate.weight")
"""Matrices to as many rows at every width."""
_HEAD_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
_QUERY = "linear_qkv.weight"


class Scale(NamedTuple):
    """Factors of a parameter group."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    def __str__(self) -> str:
        named = zip(("lr", "wd", "eps"), self, strict=True)
        return ", ".join(f"{name} x{value:.4g}" for name, value in named if value != 1.0) or "base"


@dataclass(frozen=True, kw_only=True)
class MaximalUpdate:
    """Scale learning rates, initial values and outputs from a base model.

    Raises:
        ConfigError: For a size that is not positive, or an unknown kind.
    """

    base_width: int | None = None
    """hidden_size of the base model, for :class:`GPTLightningModule`. None: the module has
    ``base_shapes``."""
    base_depth: int | None = None
    """num_layers of the base model. None: depth is not scaled."""
    base_head_dim: int | None = None
    """kv_channels of the base model. None: heads grow in number, and not in size."""
    kind: Kind | None = None
    """Rule of the optimizer's class. None: known for torch's Adam, AdamW, SGD and Muon."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is not positive. Set the base model's size.")
        if self.kind is not None and self.kind not in get_args(Kind):
            raise ConfigError(
                f"kind={self.kind!r} is no rule of maximal updates. Set "
                f"{', '.join(map(repr, get_args(Kind)))}, or leave it out for torch's classes."
            )

    def kind_of(self, optimizer: type[Optimizer]) -> Kind:
        """Return the rule of an optimizer.

        Raises:
            ConfigError: For an unknown class without ``kind``.
        """
        known = next((_KINDS[base] for base in optimizer.__mro__ if base in _KINDS), None)
        kind = known if known == "muon" else self.kind or known
        if kind is None:
            raise ConfigError(
                f"the rule of {optimizer.__name__} for maximal updates is unknown. Set "
                'MaximalUpdate(kind="adam") if its update does not depend on the scale of '
                'gradients (Adam, Lion, Adafactor), or kind="sgd" if it is proportional to it.'
            )
        return kind

    def width_ratio(self, config: TransformerConfig) -> float:
        """Return the growth of the width.

        Raises:
            ConfigError: If the growth of the model's dims does not follow from the width.
        """
        if self.base_width is None:
            raise ConfigError(
                "MaximalUpdate of a GPTModel needs base_width: set it to the hidden_size of the "
                "model whose learning rate you know."
            )
        others = (config.mla, config.mamba, config.delta_net, config.moe and config.moe.latent_size)
        if any(others):
            raise ConfigError(
                "MaximalUpdate(base_width=...) knows the dims of attention, feed-forward and "
                "experts, and this model has latent attention, latents of experts or state-space "
                "layers. Train it without maximal_update."
            )
        return config.hidden_size / self.base_width

    def head_ratio(self, config: TransformerConfig) -> float | None:
        """Return the growth of norms with the size of a head. None: the model has none."""
        if not (config.qk_layernorm and config.qk_layernorm_per_head):
            return None
        return 1.0 if self.base_head_dim is None else config.head_dim / self.base_head_dim

    def check_shapes_alone(self) -> None:
        """Check that a module with ``base_shapes`` has no other sizes of the base model.

        Raises:
            ConfigError: If one is set.
        """
        for name in _SIZES:
            if (size := getattr(self, name)) is not None:
                raise ConfigError(
                    f"MaximalUpdate has {name}={size}, a size of a GPTModel, beside base_shapes, "
                    "which say how each dim grows; depth is not scaled there. Leave it out."
                )

    def scaled(self, config: TransformerConfig) -> TransformerConfig:
        """Return the configuration with the factors of logits, scores and residual blocks."""
        width = self.width_ratio(config)
        changes: dict[str, Any] = {"logits_scaling": config.logits_scaling * width}
        if self.base_head_dim is not None:
            size = config.kv_channels or config.hidden_size // config.num_attention_heads
            scale = config.softmax_scale or 1 / sqrt(size)
            changes["softmax_scale"] = scale * sqrt(self.base_head_dim / size)
        if self.base_depth is not None:
            depth = config.num_layers / self.base_depth
            changes["residual_multiplier"] = config.residual_multiplier / depth
        return replace(config, **changes)

    def depth_of_values(self, config: TransformerConfig) -> float:
        """Return the factor of the blocks that initial values are divided for: those of the base
        model, since blocks of a deeper model enter the residual stream by a factor.
        """
        return 1.0 if self.base_depth is None else self.base_depth / config.num_layers


class Scaling:
    """Factors by name of a model.

    Args:
        rule: The user's rule.
        growths: Name -> growth of each dim of every parameter of the full model. None: of a
            GPTModel, by name.
        width: Growth of the width of a GPTModel.
        head: Growth of norms with the size of a head. None: the model has none.
        depth: Growth of the depth.
    """

    def __init__(
        self,
        rule: MaximalUpdate,
        growths: Mapping[str, Growth] | None = None,
        *,
        width: float = 1.0,
        head: float | None = None,
        depth: float = 1.0,
    ) -> None:
        self.rule = rule
        self._growths = growths
        self._width = width
        self._head = head
        self._depth = depth

    @classmethod
    def of(cls, module: nn.Module, rule: MaximalUpdate) -> Scaling:
        """Return the factors of a module with a ``config`` or with ``base_shapes``.

        Raises:
            ConfigError: If the module has neither, or sizes of the base model beside its shapes.
        """
        shapes, config = getattr(module, "base_shapes", None), getattr(module, "config", None)
        if shapes is not None:
            rule.check_shapes_alone()
            return cls(rule, shapes)
        if isinstance(config, TransformerConfig):
            return cls.of_config(config, rule)
        raise ConfigError(
            f"maximal updates of {type(module).__name__} need base_shapes. Set "
            "self.base_shapes = base_shapes(model, base) in __init__, of your model and of the "
            "same model in its base width."
        )

    @classmethod
    def of_config(cls, config: TransformerConfig, rule: MaximalUpdate) -> Scaling:
        """Return the factors of a GPTModel.

        Raises:
            ConfigError: If the rule has no ``base_width``, or the model is of another kind.
        """
        depth = 1.0 if rule.base_depth is None else config.num_layers / rule.base_depth
        return cls(rule, width=rule.width_ratio(config), head=rule.head_ratio(config), depth=depth)

    def growth(self, name: str, num_dims: int) -> Growth:
        """Return the growth of a parameter's dims.

        Raises:
            ConfigError: If the base model has no such parameter.
        """
        if self._growths is None:
            if self._head is not None and name.endswith(_HEAD_NORMS):
                return (self._head,)
            return gpt_growth(name, num_dims, self._width)
        found = next((self._growths[n] for n in _endings(name) if n in self._growths), None)
        if found is None:
            raise ConfigError(
                f"base_shapes has no {name}, so that its learning rate is unknown. Build "
                "base_shapes from the model that is trained, adapters included."
            )
        return found

    def scale(self, name: str, num_dims: int, kind: Kind, adjust: str | None = None) -> Scale:
        """Return the factors of a parameter.

        Args:
            name: Name of the parameter.
            num_dims: Dims of the parameter.
            kind: Rule of the optimizer.
            adjust: ``adjust_lr_fn`` of Muon.
        """
        depth = self._depth if ".layers." in name else 1.0
        return scale_of(
            self.growth(name, num_dims), kind, depth, adjust, multiplied=self._growths is None
        )

    def scales(self, kind: Kind, adjust: str | None = None) -> list[Scale]:
        """Return all factors in the model, in an order equal on all ranks."""
        if self._growths is not None:
            found = {
                scale_of(growth, kind, adjust=adjust, multiplied=False)
                for growth in self._growths.values()
            }
        else:
            inner = ("0.x.weight", *_FIXED_OUT, *(_HEAD_NORMS if self._head is not None else ()))
            names = (_INPUT, _OUTPUT, *(f"x.layers.{name}" for name in inner))
            found = {
                self.scale(name, num_dims, kind, adjust) for name in names for num_dims in (1, 2)
            }
        return sorted(found, reverse=True)


class GroupScaling:
    """Factors of the groups of one optimizer.

    Args:
        scaling: Factors by name.
        optimizer: Class of the optimizer.
        adjust: ``adjust_lr_fn`` of Muon.
    """

    def __init__(
        self, scaling: Scaling, optimizer: type[Optimizer], adjust: str | None = None
    ) -> None:
        self._scaling = scaling
        self._kind = scaling.rule.kind_of(optimizer)
        self._adjust = adjust
        self.scales = scaling.scales(self._kind, adjust)
        """Factors of the groups, equal on all ranks."""

    def place(self, name: str, num_dims: int) -> int:
        """Return the index of a parameter's factors."""
        return self.scales.index(self._scaling.scale(name, num_dims, self._kind, self._adjust))

    def divided(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a group for each of the factors, without parameters."""
        return [_scaled_group(group, scale) for scale in self.scales]


def _scaled_group(group: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    scaled = {**group, "params": [], "name": f"{group['name']}/{scale}"}
    for key, factor in (("lr", scale.lr), ("lr_mult", scale.lr), ("min_lr", scale.lr)):
        if key in group or key == "lr_mult":
            scaled[key] = group.get(key, 1.0) * factor
    for key in ("weight_decay", "wd_mult"):
        scaled[key] = group.get(key, 1.0) * scale.weight_decay
    scaled["eps_mult"] = scale.eps
    return scaled


def scale_eps(optimizer: Optimizer) -> None:
    """Scale epsilon of an optimizer's groups by their ``eps_mult``, once: a second call changes
    nothing. :class:`MegatronStrategy` calls this when a fit starts.
    """
    for group in optimizer.param_groups:
        factor, eps = group.pop("eps_mult", 1.0), group.get("eps")
        if isinstance(eps, float):
            group["eps"] = eps * factor


def scale_of(
    growth: Growth,
    kind: Kind,
    depth: float = 1.0,
    adjust: str | None = None,
    *,
    multiplied: bool = True,
) -> Scale:
    """Return the factors of a parameter, as ``mup`` has them.

    Args:
        growth: Growth of each dim. Dims before the last two are stacks, or of kernels, and have a
            growth of 1.
        kind: Rule of the optimizer.
        depth: Growth of the depth, for parameters in blocks.
        adjust: ``adjust_lr_fn`` of Muon.
        multiplied: Whether the forward divides by the growth of an output's fan-in.
    """
    fan_out, fan_in = growth[-2:] if len(growth) > 1 else (*growth, 1.0, 1.0)[:2]
    width = fan_out if fan_in == 1 else fan_in
    is_hidden, is_output = fan_in != 1 != fan_out, fan_out == 1 != fan_in
    eps = 1 / (width * depth)
    if kind == "muon":
        lr, eps = (1 / sqrt(width) if adjust == "match_rms_adamw" else 1.0), 1.0
    elif is_output and not multiplied:
        lr, eps = 1 / fan_in, 1.0
    elif kind == "adam":
        lr = 1 / fan_in if is_hidden else 1.0
    else:
        lr = fan_out / fan_in if is_hidden else width
    return Scale(lr, 1 / lr, eps if kind == "adam" else 1.0)


def gpt_growth(name: str, num_dims: int, width: float) -> Growth:
    """Return the growth of the dims of a GPTModel's parameter."""
    if num_dims < 2:
        return (width,)
    fan_in = 1.0 if _INPUT in name else width
    fan_out = 1.0 if name.endswith((_OUTPUT, *_FIXED_OUT)) else width
    return (*(1.0,) * (num_dims - 2), fan_out, fan_in)


def _endings(name: str) -> Iterable[str]:
    """Yield the name, and the name without the modules around the model."""
    while name:
        yield name
        name = name.partition(".")[2]


def initial_std(name: str, std: float, rule: MaximalUpdate, config: TransformerConfig) -> float:
    """Return the standard deviation of a GPTModel's matrix: 0 for the output layer.

    Args:
        name: Name of the parameter.
        std: Standard deviation in the base model.
        rule: The user's rule.
        config: The model.
    """
    if name == _OUTPUT and not config.share_embeddings_and_output_weights:
        return 0.0
    if _INPUT in name:
        return std
    return std / sqrt(rule.width_ratio(config))


def clear_query(name: str, tensor: Tensor, config: TransformerConfig) -> None:
    """Zero the query of a fused projection [groups x (queries + key + value), hidden]."""
    if not name.endswith(_QUERY):
        return
    size = config.kv_channels or config.hidden_size // config.num_attention_heads
    groups = config.query_groups
    queries = config.num_attention_heads // groups * size
    tensor.view(groups, -1, tensor.shape[-1])[:, :queries].zero_()
