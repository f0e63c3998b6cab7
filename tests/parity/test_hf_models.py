"""GPTModel's logits, loss and gradients equal those of the Hugging Face models whose weights it is
given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_lightning.models import GPTModel, RopeScaling, TransformerConfig
from tests.helpers.hf_weights import Weights, from_gpt2, from_llama, perturb
from tests.helpers.layouts import tiny_config

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 67,
    "max_sequence_length": 24,
}
HF_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "max_position_embeddings": 24,
}


def llama(**changes: Any) -> tuple[nn.Module, TransformerConfig]:
    hf = {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "sdpa",
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**HF_SIZES, **hf, tie_word_embeddings=False, **changes)
    )
    return model, tiny_config(**SIZES, num_query_groups=2, ffn_hidden_size=48)


def scaled_llama(scaling: RopeScaling) -> tuple[nn.Module, TransformerConfig]:
    theirs = asdict(scaling) | {"rope_theta": 500.0}
    theirs["truncate"] = theirs.pop("correction_range_round_to_int")
    model, config = llama(rope_parameters=theirs)
    return model, replace(config, rotary_base=500.0, rope_scaling=scaling)


def llama3() -> tuple[nn.Module, TransformerConfig]:
    """Of the four frequencies one is kept, one interpolated, and two are divided."""
    return scaled_llama(
        RopeScaling(
            rope_type="llama3", factor=8.0, original_max_position_embeddings=8,
            low_freq_factor=0.2, high_freq_factor=1.0,
        )
    )  # fmt: skip


def yarn() -> tuple[nn.Module, TransformerConfig]:
    return scaled_llama(
        RopeScaling(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=1.0,
            beta_slow=0.05,
        )
    )  # fmt: skip


def qwen2() -> tuple[nn.Module, TransformerConfig]:
    hf = {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**HF_SIZES, **hf, attn_implementation="sdpa")
    )
    options = {
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
        "share_embeddings_and_output_weights": True,
    }
    return model, tiny_config(**SIZES, **options, num_query_groups=2, ffn_hidden_size=48)


def qwen3() -> tuple[nn.Module, TransformerConfig]:
    hf = {
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "head_dim": 12,
        "rope_theta": 1e6,
    }
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **HF_SIZES, **hf, tie_word_embeddings=False, attn_implementation="sdpa"
        )
    )
    options = {
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "kv_channels": 12,
        "rotary_base": 1e6,
    }
    return model, tiny_config(**SIZES, **options, num_query_groups=1, ffn_hidden_size=48)


def gpt2() -> tuple[nn.Module, TransformerConfig]:
    hf = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 67,
        "n_positions": 24,
        "attn_implementation": "sdpa",
    }
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**hf, **off))
    options = {
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "position_embedding_type": "learned_absolute",
    }
    tied = {"add_bias_linear": True, "share_embeddings_and_output_weights": True}
    return model, tiny_config(**SIZES, **options, **tied)


FAMILIES: list[
    tuple[
        Callable[[], tuple[nn.Module, TransformerConfig]],
        Callable[[Weights, TransformerConfig], Weights],
    ]
] = [
    (llama, from_llama),
    (llama3, from_llama),
    (yarn, from_llama),
    (qwen2, from_llama),
    (qwen3, from_llama),
    (gpt2, from_gpt2),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("family", "mapping"), FAMILIES, ids=lambda f: f.__name__)
def test_forward_and_gradients_equal_hugging_face(family: Any, mapping: Any) -> None:
    torch.manual_seed(0)
    theirs, config = family()
    theirs.eval()
    perturb(theirs)
    ours = GPTModel(config)
    ours.load_state_dict(
        mapping(theirs.state_dict(), config), strict=not config.share_embeddings_and_output_weights
    )
    tokens = torch.randint(config.vocab_size, (3, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    hf_logits = theirs(inputs, use_cache=False).logits
    # Both compute in fp32 and differ in the order of sums only: logits are of order 1, so 1e-5 is
    # some 80 roundings.
    torch.testing.assert_close(ours(inputs), hf_logits, rtol=1e-5, atol=1e-5)
    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten())
    loss = ours(inputs, labels=labels).mean()
    torch.testing.assert_close(loss, hf_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    hf_loss.backward()
    expected = mapping(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config
    )
    actual = {name: p.grad for name, p in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", [llama, llama3, yarn], ids=lambda f: f.__name__)
def test_given_positions_equal_hugging_face(family: Any) -> None:
    torch.manual_seed(0)
    theirs, config = family()
    ours = GPTModel(config)
    ours.load_state_dict(from_llama(theirs.state_dict(), config))
    tokens = torch.randint(config.vocab_size, (2, 8))
    position_ids = torch.stack((torch.arange(8) + 3, torch.tensor([0, 1, 2, 3, 7, 8, 9, 10])))
    # Without one, restarting positions mean packed sequences there.
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    expected = theirs(
        tokens, position_ids=position_ids, attention_mask=mask, use_cache=False
    ).logits
    torch.testing.assert_close(
        ours(tokens, position_ids=position_ids), expected, rtol=1e-5, atol=1e-5
    )
