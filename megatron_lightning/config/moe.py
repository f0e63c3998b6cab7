"""Configuration of mixture-of-experts layers: router, experts and token dispatch. No torch here.

Names are Megatron-Core's without the prefix ``moe_``. Notation: ``t`` tokens, ``E`` experts, ``k``
experts per token (``router_topk``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from megatron_lightning.config.left_out import LEFT_OUT
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import ConfigError

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
RouterDtype = Literal["fp32", "fp64"]
DropPolicy = Literal["probs", "position"]
TokenDispatcher = Literal["alltoall", "allgather"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "router_score_function": get_args(ScoreFunction),
    "router_dtype": get_args(RouterDtype),
    "token_drop_policy": get_args(DropPolicy),
    "token_dispatcher_type": get_args(TokenDispatcher),
}
_COUNTS = (
    "num_experts", "router_topk", "ffn_hidden_size", "latent_size",
    "shared_expert_intermediate_size",
    "router_num_groups", "router_group_topk", "router_group_best",
)  # fmt: skip
_POSITIVE = ("router_topk_scaling_factor", "router_bias_update_rate", "expert_capacity_factor")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if isinstance(value, str) and (name, value) in LEFT_OUT:
        raise ConfigError(f"moe.{name} is {value!r}. {LEFT_OUT[name, value]}")
    if value not in choices:
        raise ConfigError(
            f"moe.{name} is {value!r}, which is unknown. Set it to one of {', '.join(choices)}."
        )


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite, non-negative number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0.0 <= value < float("inf")
    )


def _as_tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Router, experts and token dispatch of the layers with experts."""

    num_experts: int
    """Experts of a layer (E), over all ranks."""
    router_topk: int = 2
    """Experts per token (k)."""
    router_score_function: ScoreFunction = "softmax"
    """Function from logits to scores. Sigmoid and sqrtsoftplus (the root of softplus) score every
    expert separately. The scores of a token's k experts are divided by the sum of the k scores, if
    k is above 1."""
    router_pre_softmax: bool = False
    """Softmax over all experts before the choice of k experts. Otherwise softmax over the k chosen
    experts. Without meaning for other score functions."""
    router_topk_scaling_factor: float | None = None
    """Factor of the probabilities. None: 1."""
    router_num_groups: int | None = None
    """Groups of consecutive experts for group-limited routing. None: no groups."""
    router_group_topk: int | None = None
    """Groups to choose a token's experts from: the groups with the largest sums of the
    router_group_best best scores."""
    router_group_best: int | None = None
    """Scores in the sum that ranks a group. None: router_topk // router_group_topk, as in
    Megatron-Core. DeepSeek-V2 takes 1."""
    router_dtype: RouterDtype = "fp32"
    """Dtype of the router's matmul, scores and probabilities, under autocast as well."""
    router_load_balancing_type: LoadBalancing | Sequence[LoadBalancing] = "aux_loss"
    """Scope of the auxiliary loss to balance tokens over the experts: a micro-batch (aux_loss),
    each sequence (seq_aux_loss) or the global batch (global_aux_loss). A list combines several
    losses. none: no loss."""
    aux_loss_coeff: float | Sequence[float] = 0.0
    """Coefficient of the auxiliary loss, for example 1e-2. A list of types needs a list. 0: no
    loss."""
    z_loss_coeff: float | None = None
    """Coefficient of the loss to keep logits small, for example 1e-3. None: no loss."""
    router_bias: bool = False
    """Whether the router's product has a learned bias, a part of the logits (gpt-oss)."""
    router_enable_expert_bias: bool = False
    """Balance without a loss, by a bias of every expert. The bias is added to the scores for the
    choice of experts, but not to the probabilities, and follows the tokens of each optimizer
    step."""
    router_bias_update_rate: float = 1e-3
    """Change of an expert's bias per optimizer step."""
    router_force_load_balancing: bool = False
    """Choose experts by random logits, for benchmarks."""
    input_jitter_eps: float | None = None
    """In training, multiply the router's input by random factors between 1 - eps and 1 + eps. None:
    no jitter."""
    expert_capacity_factor: float | None = None
    """An expert takes at most this multiple of a fair share of a rank's tokens, t k / E. Further
    tokens are dropped. None: no token is dropped."""
    token_drop_policy: DropPolicy = "probs"
    """Drop the tokens with the lowest probabilities, or the last tokens of the micro-batch."""
    pad_expert_input_to_capacity: bool = False
    """Fill every expert up to the capacity with tokens of probability 0. Shapes then do not depend
    on the routing."""
    ffn_hidden_size: int | None = None
    """Width of an expert. None: the model's ffn_hidden_size."""
    latent_size: int | None = None
    """Size of the tokens in the experts (latent MoE). One projection maps every token to its
    latent, and another the sum of its experts back. Router and shared experts see the full token.
    None: experts see the full token as well."""
    shared_expert_intermediate_size: int | None = None
    """Width of the shared experts together. Shared experts see every token. None: no shared
    expert."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by a learned sigmoid gate."""
    layer_freq: int | Sequence[int] = 1
    """Layers with experts: every n-th layer, starting with the first, or a list with 1 (experts) or
    0 (dense) for each layer."""
    token_dispatcher_type: TokenDispatcher = "alltoall"
    """Dispatch of tokens to the ranks of the experts: every row is sent to the expert's rank
    (alltoall), or all rows to all ranks (allgather)."""
    grouped_gemm: bool = True
    """Multiply all experts of a rank by a single grouped GEMM if torch has a kernel for the device
    and dtype. Otherwise, or if False, loop over the experts, with the same weights."""

    def __post_init__(self) -> None:
        for name in ("router_load_balancing_type", "aux_loss_coeff", "layer_freq"):
            if isinstance(getattr(self, name), list):
                # A config from YAML or a checkpoint equals a config from code, and hashes.
                object.__setattr__(self, name, tuple(getattr(self, name)))
        optional = {field.name for field in fields(self) if field.default is None}
        for name in _COUNTS:
            value = getattr(self, name)
            if not (is_count(value) or (value is None and name in optional)):
                raise ConfigError(f"moe.{name} is {value!r}; it must be a positive integer.")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"moe.{name} is {value!r}. Set it to true or false.")
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in _POSITIVE:
            value = getattr(self, name)
            if not ((_is_number(value) and value) or (value is None and name in optional)):
                raise ConfigError(f"moe.{name} is {value!r}; it must be a positive number.")
        self._check_topk()
        self._check_groups()
        self._check_losses()
        self._check_capacity()
        self._check_layers()

    def _check_topk(self) -> None:
        if self.router_topk > self.num_experts:
            raise ConfigError(
                f"moe.router_topk={self.router_topk} is above num_experts={self.num_experts}; a "
                "token is sent to different experts. Set router_topk to at most "
                f"{self.num_experts}."
            )
        softmax = self.router_score_function == "softmax"
        if softmax and self.router_topk == 1 and not self.router_pre_softmax:
            raise ConfigError(
                "moe.router_topk=1 with router_score_function=softmax and "
                "router_pre_softmax=False: the softmax over one chosen expert is always 1, so the "
                "router gets no gradient. Set router_pre_softmax to True."
            )
        if softmax and self.router_enable_expert_bias:
            raise ConfigError(
                "moe.router_enable_expert_bias=True with router_score_function=softmax: a bias "
                "is for scores of which each expert has its own. Set router_score_function "
                "to sigmoid or sqrtsoftplus, or router_enable_expert_bias to False."
            )
        eps = self.input_jitter_eps
        if eps is not None and not (_is_number(eps) and 0.0 < eps < 1.0):
            raise ConfigError(
                f"moe.input_jitter_eps is {eps!r}; inputs are multiplied by 1 - "
                "eps to 1 + eps. Set it between 0 and 1, or leave it out."
            )

    def _check_groups(self) -> None:
        groups, chosen = self.router_num_groups, self.router_group_topk
        if groups is None and chosen is None:
            if self.router_group_best is not None:
                raise ConfigError(
                    f"moe.router_group_best={self.router_group_best} ranks groups, and there are "
                    "none. Set router_num_groups and router_group_topk, or leave it out."
                )
            return
        if groups is None or chosen is None:
            raise ConfigError(
                f"moe.router_num_groups={groups} and router_group_topk={chosen}: one says how many "
                "groups there are, the other how many a token uses. Set both, or leave both out."
            )
        if self.num_experts % groups:
            raise ConfigError(
                f"moe.num_experts={self.num_experts} is not divisible by "
                f"router_num_groups={groups}; all groups have equally many experts. Set "
                "router_num_groups to a divisor of the experts."
            )
        if chosen > groups:
            raise ConfigError(
                f"moe.router_group_topk={chosen} is above router_num_groups={groups}. Set "
                f"router_group_topk to at most {groups}."
            )
        size = self.num_experts // groups
        if not chosen <= self.router_topk <= chosen * size:
            raise ConfigError(
                f"moe.router_topk={self.router_topk} with router_group_topk={chosen} of "
                f"router_num_groups={groups}: a token uses {chosen} groups with {chosen * size} "
                f"experts together. Set router_topk from {chosen} to {chosen * size}."
            )
        if self.router_group_best is not None and self.router_group_best > size:
            raise ConfigError(
                f"moe.router_group_best={self.router_group_best} is above the {size} experts of a "
                f"group. Set it to at most {size}."
            )

    @property
    def group_best(self) -> int | None:
        """Scores in the sum that ranks a group. None: there are no groups."""
        if self.router_group_topk is None:
            return None
        return self.router_group_best or self.router_topk // self.router_group_topk

    def _check_losses(self) -> None:
        types = _as_tuple(self.router_load_balancing_type)
        coefficients = _as_tuple(self.aux_loss_coeff)
        for name in types:
            _check_choice("router_load_balancing_type", name, get_args(LoadBalancing))
        if not types or len(set(types)) < len(types) or ("none" in types and len(types) > 1):
            raise ConfigError(
                f"moe.router_load_balancing_type is {list(types)}; a list combines different "
                "losses. Name each of aux_loss, seq_aux_loss and global_aux_loss once at most, or "
                "set none."
            )
        coefficients_by_name = [("aux_loss_coeff", value) for value in coefficients]
        if self.z_loss_coeff is not None:
            coefficients_by_name.append(("z_loss_coeff", self.z_loss_coeff))
        for name, value in coefficients_by_name:
            if not _is_number(value):
                raise ConfigError(f"moe.{name} is {value!r}; it must be 0 or a positive number.")
        single = isinstance(self.aux_loss_coeff, (int, float))
        if len(types) != len(coefficients) and not (single and not self.aux_loss_coeff):
            raise ConfigError(
                f"moe.router_load_balancing_type={list(types)} with "
                f"aux_loss_coeff={list(coefficients)}: every loss has a coefficient of its own. "
                "Set aux_loss_coeff to a list of the same length."
            )
        if types == ("none",) and any(coefficients):
            raise ConfigError(
                f"moe.aux_loss_coeff={self.aux_loss_coeff} with router_load_balancing_type=none: "
                "there is no loss to multiply. Set aux_loss_coeff to 0, or the type to aux_loss."
            )

    def _check_capacity(self) -> None:
        if self.expert_capacity_factor is not None:
            return
        if self.pad_expert_input_to_capacity:
            raise ConfigError(
                "moe.pad_expert_input_to_capacity=True with expert_capacity_factor=None: experts "
                "have no capacity to fill. Set expert_capacity_factor, or "
                "pad_expert_input_to_capacity to False."
            )
        if self.token_drop_policy != "probs":
            raise ConfigError(
                f"moe.token_drop_policy={self.token_drop_policy} with expert_capacity_factor=None: "
                "no token is dropped. Set expert_capacity_factor, or leave token_drop_policy out."
            )

    def _check_layers(self) -> None:
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ConfigError(
                "moe.shared_expert_gate=True with shared_expert_intermediate_size=None: there is "
                "no shared expert. Set shared_expert_intermediate_size, or shared_expert_gate to "
                "False."
            )
        freq: object = self.layer_freq
        if isinstance(freq, tuple):
            if not all(type(entry) is int and entry in (0, 1) for entry in freq) or 1 not in freq:
                raise ConfigError(
                    f"moe.layer_freq is {list(freq)}; an entry is 1 (experts) or 0 (dense), and at "
                    "least one is 1. Set it so, or leave moe out."
                )
        elif not is_count(freq):
            raise ConfigError(
                f"moe.layer_freq is {freq!r}, which names no layers. Set it to a positive integer "
                "n, for every n-th layer, or to a list with 1 or 0 for each layer."
            )

    def layer_kinds(self, num_layers: int) -> tuple[str, ...]:
        """Return the kind of each of a model's ``num_layers`` layers.

        Raises:
            ConfigError: If ``layer_freq`` is a list of another length.
        """
        freq = self.layer_freq
        if isinstance(freq, int):
            return tuple("dense" if i % freq else "expert" for i in range(num_layers))
        if len(freq) != num_layers:
            raise ConfigError(
                f"moe.layer_freq has {len(freq)} entries, and num_layers is {num_layers}; there is "
                "one entry for each layer. Set it to a list of that length."
            )
        return tuple("expert" if entry else "dense" for entry in freq)

    @property
    def auxiliary_losses(self) -> Mapping[LoadBalancing, float]:
        """Nonzero coefficients of the auxiliary losses, by type."""
        types = _as_tuple(self.router_load_balancing_type)
        values = _as_tuple(self.aux_loss_coeff)
        return {kind: float(value) for kind, value in zip(types, values, strict=False) if value}
