"""The configuration of mixture-of-experts layers: its refusals, and the kinds of layers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lightning.errors import ConfigError
from tests.helpers.layouts import tiny_config
from tests.helpers.moe import config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "moe.num_experts is 0; it must be a positive integer"),
        ({"router_topk": True}, "moe.router_topk is True"),
        ({"router_topk": None}, "moe.router_topk is None; it must be a positive integer"),
        ({"router_bias_update_rate": None}, "moe.router_bias_update_rate is None"),
        ({"router_pre_softmax": "false"}, "router_pre_softmax is 'false'. Set it to true or false"),
        ({"input_jitter_eps": "0.1"}, "input_jitter_eps is '0.1'.*between 0 and 1"),
        ({"ffn_hidden_size": 2.5}, "moe.ffn_hidden_size is 2.5"),
        ({"shared_expert_intermediate_size": -1}, "moe.shared_expert_intermediate_size is -1"),
        ({"router_topk": 9}, "router_topk=9 is above num_experts=8.*at most 8"),
        ({"router_topk": 1}, "softmax and router_pre_softmax=False.*no gradient.*to True"),
        ({"router_enable_expert_bias": True}, "expert_bias=True with.*softmax.*sigmoid or sqrt"),
        ({"router_score_function": "relu"}, "'relu', which is unknown.*softmax, sigmoid, sqrtsoft"),
        ({"router_dtype": "bf16"}, "router_dtype is 'bf16', which is unknown.*fp32, fp64"),
        ({"token_drop_policy": "random"}, "token_drop_policy is 'random'.*probs, position"),
        ({"token_dispatcher_type": "nvls"}, "'nvls', which is unknown.*alltoall, allgather"),
        ({"token_dispatcher_type": "flex"}, "'flex'. Its fused kernels.*alltoall"),
        ({"router_load_balancing_type": "sinkhorn"}, "'sinkhorn'.*depends on the layout.*aux_loss"),
        ({"router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "'sinkhorn'"),
        (
            {"router_load_balancing_type": "sinkhorn", "expert_capacity_factor": 1.0},
            "'sinkhorn'.*Set it to aux_loss",
        ),
        ({"router_load_balancing_type": "quantile_balancing"}, "'quantile_balancing'.*bias"),
        ({"router_load_balancing_type": "loss"}, "'loss', which is unknown.*global_aux_loss, none"),
        ({"router_load_balancing_type": None}, "router_load_balancing_type is None"),
        ({"router_load_balancing_type": []}, "combines different losses"),
        ({"router_load_balancing_type": ["aux_loss", "aux_loss"]}, "once at most"),
        ({"router_load_balancing_type": ["aux_loss", "none"]}, "or set none"),
        (
            {"router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "aux_loss_coeff": 0.1},
            r"aux_loss_coeff=\[0.1\].*list of the same length",
        ),
        ({"aux_loss_coeff": [0.1, 0.1]}, r"type=\['aux_loss'\] with aux_loss_coeff=\[0.1, 0.1\]"),
        ({"aux_loss_coeff": -0.1}, "aux_loss_coeff is -0.1; it must be 0 or a positive number"),
        ({"aux_loss_coeff": "much"}, "aux_loss_coeff is 'much'"),
        ({"z_loss_coeff": float("inf")}, "z_loss_coeff is inf"),
        (
            {"router_load_balancing_type": "none", "aux_loss_coeff": 0.1},
            "aux_loss_coeff=0.1 with.*none: there is no loss.*to 0",
        ),
        ({"router_num_groups": 2}, "router_num_groups=2 and router_group_topk=None.*Set both"),
        ({"router_group_topk": 2}, "router_num_groups=None and router_group_topk=2.*Set both"),
        (
            {"router_num_groups": 3, "router_group_topk": 1},
            "num_experts=8 is not divisible by router_num_groups=3.*divisor of the experts",
        ),
        ({"router_num_groups": 2, "router_group_topk": 3}, "router_group_topk=3 is above.*most 2"),
        (
            {"router_num_groups": 8, "router_group_topk": 1},
            "router_topk=2 with router_group_topk=1.*from 1 to 1",
        ),
        (
            {"router_num_groups": 8, "router_group_topk": 4},
            "router_topk=2 with router_group_topk=4.*from 4 to 4",
        ),
        ({"router_group_best": 1}, "router_group_best=1 ranks groups, and there are none"),
        (
            {"router_num_groups": 2, "router_group_topk": 1, "router_group_best": 5},
            "router_group_best=5 is above the 4 experts of a group",
        ),
        ({"router_topk_scaling_factor": 0.0}, "scaling_factor is 0.0; it must be a positive"),
        ({"router_bias_update_rate": -1e-3}, "router_bias_update_rate is -0.001"),
        ({"input_jitter_eps": 1.0}, "input_jitter_eps is 1.0.*between 0 and 1"),
        ({"expert_capacity_factor": -1.0}, "expert_capacity_factor is -1.0"),
        (
            {"pad_expert_input_to_capacity": True},
            "pad_expert_input_to_capacity=True with expert_capacity_factor=None.*no capacity",
        ),
        ({"token_drop_policy": "position"}, "token_drop_policy=position with.*no token is dropped"),
        ({"latent_size": 0}, "latent_size is 0; it must be a positive integer"),
        ({"shared_expert_gate": True}, "shared_expert_gate=True with.*there is no shared expert"),
        ({"layer_freq": 0}, "layer_freq is 0.*every n-th layer"),
        ({"layer_freq": True}, "layer_freq is True"),
        ({"layer_freq": "[1]*4"}, r"layer_freq is '\[1\]\*4'"),
        ({"layer_freq": [0, 2]}, r"layer_freq is \[0, 2\]; an entry is 1"),
        ({"layer_freq": [0, 0]}, "at least one is 1.*leave moe out"),
    ],
)  # fmt: skip
def test_wrong_options_name_value_and_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_kinds_of_layers() -> None:
    assert config().layer_kinds(2) == ("expert", "expert")
    assert config(layer_freq=2).layer_kinds(3) == ("expert", "dense", "expert")
    # DeepSeek: the first layers are dense.
    assert config(layer_freq=[0, 1, 1]).layer_kinds(3) == ("dense", "expert", "expert")
    with pytest.raises(ConfigError, match="layer_freq has 3 entries, and num_layers is 4"):
        config(layer_freq=[0, 1, 1]).layer_kinds(4)


def test_a_config_with_lists_equals_one_with_tuples() -> None:
    lists, tuples = (
        config(
            layer_freq=kind([1, 0]), aux_loss_coeff=kind([0.1, 0.0]),
            router_load_balancing_type=kind(["aux_loss", "seq_aux_loss"]),
        )
        for kind in (list, tuple)
    )  # fmt: skip
    assert lists == tuples and hash(lists) == hash(tuples)
    assert lists.auxiliary_losses == {"aux_loss": 0.1}
    assert config(router_load_balancing_type="none").auxiliary_losses == {}


@pytest.mark.parametrize("group", ["moe", "mla"])
def test_unknown_names_of_a_group_are_named(group: str) -> None:
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"{group}\.expert_count is unknown. Set one of "):
        tiny_config(**sizes, **{group: {"expert_count": 8}})
