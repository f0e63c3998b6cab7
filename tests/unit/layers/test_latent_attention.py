"""Latent attention: its configuration, the rotation of neighbors, and heads of unequal sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import LatentAttentionConfig, RopeScaling, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import CoreAttention, Documents, SequenceInfo
from megatron_lightning.layers.attention.latent_attention import LatentAttention
from megatron_lightning.layers.attention.rotary import RotaryEmbedding, apply_rotary, score_factor
from megatron_lightning.models import GPTModel, num_parameters
from megatron_lightning.parallel import ParallelLayout
from megatron_lightning.rules import check_model_layout
from tests.helpers.layouts import tiny_config

MLA = LatentAttentionConfig(
    q_lora_rank=14, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8
)
SIZES: dict[str, Any] = {
    "hidden_size": 30, "vocab_size": 40,
    "ffn_hidden_size": 48,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 0}, "mla.kv_lora_rank is 0; it must be a positive integer"),
        ({"q_lora_rank": 2.5}, "mla.q_lora_rank is 2.5"),
        ({"v_head_dim": None}, "mla.v_head_dim is None"),
        ({"qk_head_dim": True}, "mla.qk_head_dim is True"),
        ({"qk_pos_emb_head_dim": 5}, "qk_pos_emb_head_dim is 5.*pairs.*even number"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatentAttentionConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_query_groups": 2}, "num_query_groups=2 with mla.*num_attention_heads=4.*Leave num"),
        (
            {"position_embedding_type": "learned_absolute"},
            "learned_absolute with mla: its qk_pos_emb_head_dim=4.*to rope",
        ),
        ({"position_embedding_type": "none"}, "position_embedding_type=none with mla"),
        ({"kv_channels": 8}, "kv_channels=8 with mla.*v_head_dim. Leave kv_channels out"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5 with mla.*qk_pos_emb_head_dim"),
        ({"add_qkv_bias": True}, "add_qkv_bias=True with mla: there is no linear_qkv"),
        ({"add_bias_linear": True}, "add_bias_linear=True with mla.*Leave add_bias_linear out"),
        ({"mla": 3}, "mla is 3, which describes no LatentAttentionConfig"),
    ],
)
def test_options_of_other_attention_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**SIZES | {"mla": MLA} | options)


def test_heads_that_ranks_cannot_divide_are_refused() -> None:
    config = tiny_config(**SIZES, mla=MLA)
    layout = ParallelLayout(tensor_model_parallel_size=3)
    with pytest.raises(ConfigError, match=r"num_attention_heads=4 is not divisible by tensor.*=3"):
        check_model_layout(config, layout, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_layernorm": True},
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        {"mla": LatentAttentionConfig(q_lora_rank=None), "qk_layernorm": True},
    ],
    ids=str,
)
def test_names_and_number_of_parameters(options: dict[str, Any]) -> None:
    config = tiny_config(**SIZES | {"mla": MLA} | options)
    model = GPTModel(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    assert TransformerConfig(**config.to_dict()) == config  # type: ignore[arg-type]
    attention = model.decoder.layers["0"].self_attention
    assert isinstance(attention, LatentAttention)
    full = config.mla is not None and config.mla.q_lora_rank is None
    queries = {"linear_q_proj"} if full else {"linear_q_down_proj", "linear_q_up_proj"}
    norms = {"kv_layernorm"} if full else {"kv_layernorm", "q_layernorm"}
    others = {"linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"}
    assert {name.split(".")[0] for name, _ in attention.named_parameters()} == (
        queries | others | (norms if config.qk_layernorm else set())
    )


def test_initial_weights() -> None:
    config = tiny_config(
        num_layers=8,
        hidden_size=64,
        vocab_size=40,
        init_method_std=0.02,
        qk_layernorm=True,
        mla=LatentAttentionConfig(q_lora_rank=64, kv_lora_rank=64),
    )
    attention: Any = GPTModel(config).decoder.layers["3"].self_attention
    for name in ("q_down", "q_up", "kv_down", "kv_up"):
        weight = attention.get_parameter(f"linear_{name}_proj.weight")
        assert weight.std().item() == pytest.approx(0.02, rel=0.03), name
    assert attention.linear_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert (attention.q_layernorm.weight == 1).all() and (attention.kv_layernorm.weight == 1).all()


def test_scores_are_sharpened_by_mscale_all_dim() -> None:
    yarn: dict[str, Any] = {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    assert score_factor(None) == score_factor(RopeScaling(**yarn)) == 1.0
    # DeepSeek-V3: yarn_get_mscale(40, 1.0)^2.
    expected = (0.1 * math.log(40.0) + 1.0) ** 2
    assert score_factor(RopeScaling(**yarn, mscale_all_dim=1.0)) == pytest.approx(expected)


def test_rotated_neighbors_are_complex_products() -> None:
    x = torch.randn(5, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    cosines, sines = RotaryEmbedding(6, 100.0)(5, x)
    turned = apply_rotary(x, cosines, sines, interleaved=True)
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous())
    product = pairs * torch.complex(cosines, sines)[:, :, None]
    expected = torch.cat((product.real, product.imag, x[..., 6:]), -1)
    torch.testing.assert_close(turned, expected)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention of [s, b, n, d] by its definition, with scores in a matrix."""
    heads = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbne->sbne", weights, v).flatten(2)


@pytest.mark.parametrize("kind", ["plain", "window", "documents"])
@pytest.mark.parametrize(("d", "e"), [(6, 4), (4, 7)])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_unequal_heads_equal_their_definition(kind: str, d: int, e: int, in_fp32: bool) -> None:
    """Outputs and gradients of fp32; sums in another order: 1e-5."""
    generator = torch.Generator().manual_seed(0)
    s = 8
    q, k, v = (
        torch.randn(s, 2, n, size, generator=generator).requires_grad_()
        for n, size in ((4, d), (2, d), (2, e))
    )
    distance = torch.arange(s)[:, None] - torch.arange(s)
    visible, sequence = distance >= 0, SequenceInfo()
    if kind == "window":
        visible, sequence = visible & (distance <= 2), SequenceInfo(window=2)
    elif kind == "documents":
        number = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        visible = visible & (number[:, None] == number)
        sequence = SequenceInfo(documents=Documents.of_ids(number[None]))
    out = CoreAttention(0.0, in_fp32=in_fp32)(q, k, v, sequence)
    expected = _dense(q, k, v, visible)
    assert out.shape == (s, 2, 4 * e)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=generator)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    for grad, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-5)
