"""GPTModel equals Mixtral, Qwen3-MoE and OLMoE of Hugging Face: logits, loss, gradients and the
balancing loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import MoEConfig
from megatron_lightning.models import GPTModel, TransformerConfig
from tests.helpers.hf_weights import from_llama, perturb
from tests.helpers.layouts import tiny_config

transformers = pytest.importorskip("transformers")

EXPERTS, CHOSEN, COEFFICIENT = 4, 2, 0.05
OURS: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "vocab_size": 67,
    "max_sequence_length": 24,
    "rotary_base": 500.0,
}
THEIRS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 67,
    "max_position_embeddings": 24,
    "num_experts_per_tok": CHOSEN,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
Family = Callable[..., tuple[nn.Module, TransformerConfig]]


def _pair(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], moe: dict[str, Any]
) -> tuple[nn.Module, TransformerConfig]:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    given = getattr(transformers, f"{name}Config")(**(THEIRS | theirs), rope_parameters=rope)
    model = getattr(transformers, f"{name}ForCausalLM")(given)
    experts = MoEConfig(num_experts=EXPERTS, router_topk=CHOSEN, **moe)
    return model, tiny_config(**(OURS | ours), moe=experts)


def mixtral(theirs: Any = (), ours: Any = (), moe: Any = ()) -> Any:
    """Probabilities that sum to 1: softmax over the chosen experts."""
    return _pair("Mixtral", {"num_local_experts": EXPERTS, **dict(theirs)}, dict(ours), dict(moe))


def windowed_mixtral(**options: Any) -> Any:
    """A token sees itself and three before."""
    return mixtral({"sliding_window": 4}, {"window_size": (3, 0)}, **options)


def eager_mixtral(**options: Any) -> Any:
    """Experts computed one by one there."""
    return mixtral({"experts_implementation": "eager"}, **options)


def qwen3_moe(theirs: Any = (), ours: Any = (), moe: Any = ()) -> Any:
    """Norms of heads, whose size does not follow from the hidden size; experts of a width of their
    own."""
    sizes = {"num_experts": EXPERTS, "moe_intermediate_size": 20, "head_dim": 12}
    given = {"norm_topk_prob": True, "rms_norm_eps": 1e-6, **sizes, **dict(theirs)}
    mine = {"qk_layernorm": True, "kv_channels": 12, "layernorm_epsilon": 1e-6, **dict(ours)}
    return _pair("Qwen3Moe", given, mine, {"ffn_hidden_size": 20, **dict(moe)})


def mixed_qwen3_moe(theirs: Any = (), ours: Any = (), moe: Any = ()) -> Any:
    """Experts in every second layer, probabilities of all experts as they are."""
    sparse = {"decoder_sparse_step": 2, "norm_topk_prob": False}
    late = {"layer_freq": (0, 1), "router_pre_softmax": True}
    return qwen3_moe(sparse | dict(theirs), ours, late | dict(moe))


def olmoe(theirs: Any = (), ours: Any = (), moe: Any = ()) -> Any:
    """Norms over all heads; probabilities of all experts as they are."""
    norms = {"qk_layernorm": True, "qk_layernorm_per_head": False}
    return _pair(
        "Olmoe",
        {"num_experts": EXPERTS, **dict(theirs)},
        norms | dict(ours),
        {"router_pre_softmax": True, **dict(moe)},
    )


def normalized_olmoe(**options: Any) -> Any:
    return olmoe({"norm_topk_prob": True}, moe={"router_pre_softmax": False}, **options)


FAMILIES: list[Family] = [
    mixtral,
    windowed_mixtral,
    eager_mixtral,
    qwen3_moe,
    mixed_qwen3_moe,
    olmoe,
    normalized_olmoe,
]


def _models(pair: tuple[nn.Module, TransformerConfig]) -> tuple[nn.Module, GPTModel]:
    theirs, config = pair
    perturb(theirs)
    ours = GPTModel(config)
    ours.load_state_dict(from_llama(theirs.state_dict(), config))
    return theirs, ours


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(67, (3, 17))
    return tokens[:, :-1], tokens[:, 1:]


def _assert_equal_gradients(theirs: nn.Module, ours: GPTModel) -> None:
    expected = from_llama({n: p.grad for n, p in theirs.named_parameters()}, ours.config)
    actual = {name: p.grad for name, p in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_forward_and_gradients_equal_hugging_face(family: Family) -> None:
    torch.manual_seed(0)
    theirs, ours = _models(family())
    inputs, labels = _batch()
    hf_logits = theirs(inputs, use_cache=False).logits
    # fp32, and sums in another order: 1e-5 is some 80 roundings.
    torch.testing.assert_close(ours(inputs), hf_logits, rtol=1e-5, atol=1e-5)
    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    loss = ours(inputs, labels=labels).mean()
    torch.testing.assert_close(loss, hf_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    hf_loss.backward()
    _assert_equal_gradients(theirs, ours)


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", [mixtral, qwen3_moe, olmoe], ids=lambda f: f.__name__)
def test_balancing_loss_of_a_layer_is_hugging_face_s(family: Family) -> None:
    """Theirs counts a token once for each of its experts, ours once: the coefficient is k times
    theirs. Over several layers theirs is of the layers' means, and ours the sum of their losses.
    """
    torch.manual_seed(0)
    theirs, ours = _models(
        family(
            {"num_hidden_layers": 1}, {"num_layers": 1}, {"aux_loss_coeff": COEFFICIENT * CHOSEN}
        )
    )
    inputs, labels = _batch()
    out = theirs(inputs, use_cache=False, output_router_logits=True)
    hf_loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    (hf_loss + COEFFICIENT * out.aux_loss).backward()
    ours(inputs, labels=labels).mean().backward()
    [reported] = [
        float(value)
        for key, of_key in ours.decoder.layers["0"].mlp.report.take().items()
        if key.name == "aux_loss"
        for value, _ in of_key.values()
    ]
    assert reported == pytest.approx(COEFFICIENT * out.aux_loss.item(), rel=1e-6)
    _assert_equal_gradients(theirs, ours)
