"""Configuration rows of models with experts: layers with experts, and token routing."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.bridge.family_rules.settings import (
    Row,
    Settings,
    UnsupportedSettingError,
    Values,
)

QUICK_SLOPE = 1.702
"""Slope of the sigmoid in ``quick_geglu``."""


@dataclass(frozen=True)
class SparseSteps(Row):
    """Experts in every n-th layer (``decoder_sparse_step``), except in layers listed as dense."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``. Models without experts are refused."""
        step, dense = theirs["decoder_sparse_step"], set(theirs.get("mlp_only_layers") or ())
        layers = range(theirs["num_hidden_layers"])
        kinds = tuple(int((i + 1) % step == 0 and i not in dense) for i in layers)
        if 1 not in kinds:
            raise UnsupportedSettingError({"decoder_sparse_step": step, "mlp_only_layers": dense})
        return {"moe.layer_freq": kinds}

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        kinds = ours.get("moe.layer_freq", ())
        dense = [index for index, kind in enumerate(kinds) if not kind]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class LimitedGate(Row):
    """The largest gate of gpt-oss. Versions of ``transformers`` without the keys have the same
    numbers in code.
    """

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``. Another slope of the gate's sigmoid is
        refused.
        """
        slope = theirs.get("swiglu_alpha", QUICK_SLOPE)
        if slope != QUICK_SLOPE:
            raise UnsupportedSettingError({"swiglu_alpha": slope})
        return {"activation_func_clamp_value": float(theirs.get("swiglu_limit", 7.0))}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        return {"swiglu_limit": ours["activation_func_clamp_value"]}


@dataclass(frozen=True)
class FirstDense(Row):
    """Experts in all layers but the first n (``first_k_dense_replace``)."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``. Models without experts are refused."""
        num_layers, num_dense = theirs["num_hidden_layers"], theirs["first_k_dense_replace"]
        if num_dense >= num_layers:
            raise UnsupportedSettingError({"first_k_dense_replace": num_dense})
        return {"moe.layer_freq": (0,) * num_dense + (1,) * (num_layers - num_dense)}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        return {"first_k_dense_replace": (*ours.get("moe.layer_freq", ()), 1).index(1)}


@dataclass(frozen=True)
class SharedExperts(Row):
    """Width of all shared experts together, a multiple of one expert's width."""

    def read(self, theirs: Settings) -> Values:
        """Return the field of ``TransformerConfig``."""
        width = theirs["n_shared_experts"] * theirs["moe_intermediate_size"]
        return {"moe.shared_expert_intermediate_size": width}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        shared_size = ours.get("moe.shared_expert_intermediate_size") or 0
        return {"n_shared_experts": shared_size // ours.get("moe.ffn_hidden_size", 1)}


@dataclass(frozen=True)
class Groups(Row):
    """Groups of experts for a token's choice. A group is ranked by the sum of its best scores."""

    num_best: int
    """Number of scores in the family's sum for a group."""
    switch: bool = False
    """Whether ``topk_method`` says if there are groups."""

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ``TransformerConfig``. Other methods of choice are refused."""
        groups, chosen = theirs.get("n_group"), theirs.get("topk_group")
        method = theirs.get("topk_method") if self.switch else "group_limited_greedy"
        if method == "greedy" or (groups or 1) == 1:
            return {}
        if method != "group_limited_greedy":
            raise UnsupportedSettingError({"topk_method": method})
        return {
            "moe.router_num_groups": groups,
            "moe.router_group_topk": chosen,
            "moe.router_group_best": self.num_best,
        }

    def write(self, ours: Values) -> Values:
        """Return the keys of config.json."""
        groups = ours.get("moe.router_num_groups")
        keys: Values = {
            "n_group": groups or 1,
            "topk_group": ours.get("moe.router_group_topk") or 1,
        }
        if self.switch:
            keys["topk_method"] = "greedy" if groups is None else "group_limited_greedy"
        return keys


@dataclass(frozen=True)
class NormalizedScores(Row):
    """The scores of a token's experts are divided by their sum, if there are several."""

    def read(self, theirs: Settings) -> Values:
        """Return no field. Other normalizations are refused."""
        topk, normalized = theirs["num_experts_per_tok"], theirs["norm_topk_prob"]
        if normalized != (topk > 1):
            raise UnsupportedSettingError(
                {"norm_topk_prob": normalized, "num_experts_per_tok": topk}
            )
        return {}

    def write(self, ours: Values) -> Values:
        """Return the key."""
        return {"norm_topk_prob": ours.get("moe.router_topk", 2) > 1}
