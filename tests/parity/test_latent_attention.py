"""DeepSeek's latent attention: its models in ``transformers``, and training on every layout against
one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import (
    ContextOptions,
    LatentAttentionConfig,
    MoEConfig,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, VPP, fit, tiny_config
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers")

Weights = dict[str, Tensor]
VOCABULARY = 67
SIZES = {
    "num_layers": 3,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_sequence_length": 24,
    "ffn_hidden_size": 44,
    "layernorm_epsilon": 1e-6,  # their norms of latents know no other
    "qk_layernorm": True,
}
HF_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": None,
    "attn_implementation": "sdpa",
}
YARN = RopeScaling(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=0.05
)
SHARP = RopeScaling(**(asdict(YARN) | {"mscale": 0.7, "mscale_all_dim": 1.5}))
MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}


def from_deepseek(hf: Weights, config: TransformerConfig) -> Weights:
    """Map the names; works on weights and on their gradients."""
    ours = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i, kind in enumerate(config.layer_kinds):
        theirs, layer = f"model.layers.{i}", f"decoder.layers.{i}"
        for name, other in MODULES.items():
            if f"{theirs}.{other}.weight" in hf:
                ours[f"{layer}.{name}.weight"] = hf[f"{theirs}.{other}.weight"]
        for mlp in ("mlp", "mlp.shared_experts") if kind == "expert" else ("mlp",):
            gate_up = [hf.get(f"{theirs}.{mlp}.{x}_proj.weight") for x in ("gate", "up")]
            if gate_up[0] is not None:
                ours[f"{layer}.{mlp}.linear_fc1.weight"] = torch.cat(gate_up)
        if kind == "expert":
            experts = f"{theirs}.mlp.experts"
            ours[f"{layer}.mlp.experts.linear_fc1.weight"] = hf[f"{experts}.gate_up_proj"]
            ours[f"{layer}.mlp.experts.linear_fc2.weight"] = hf[f"{experts}.down_proj"]
        bias = hf.get(f"{theirs}.mlp.gate.e_score_correction_bias")
        if bias is not None:
            ours[f"{layer}.mlp.router.expert_bias"] = bias
    return ours


def deepseek(
    version: str, q_lora_rank: int | None, scaling: RopeScaling | None = None, **experts: Any
) -> tuple[nn.Module, TransformerConfig]:
    """Return a model of ``transformers`` whose layers are dense, or but the first have experts."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if scaling is not None:
        rope |= asdict(scaling)
        rope["truncate"] = rope.pop("correction_range_round_to_int")
    theirs: dict[str, Any] = {"q_lora_rank": q_lora_rank, "rope_parameters": rope}
    moe = None
    if experts:
        moe = MoEConfig(
            num_experts=8, ffn_hidden_size=12, shared_expert_intermediate_size=24,
            layer_freq=(0, 1, 1), **experts,
        )  # fmt: skip
        theirs |= {
            "num_experts_per_tok": moe.router_topk,
            "routed_scaling_factor": moe.router_topk_scaling_factor,
            "n_group": moe.router_num_groups,
            "topk_group": moe.router_group_topk,
        }
    theirs["first_k_dense_replace"] = 3 if moe is None else 1
    if version == "V2" and moe is not None and moe.router_num_groups:
        theirs["topk_method"] = "group_limited_greedy"
    options = getattr(transformers, f"Deepseek{version}Config")(**HF_SIZES, **theirs)
    model = getattr(transformers, f"Deepseek{version}ForCausalLM")(options)
    config = tiny_config(
        **SIZES,
        rotary_base=500.0,
        rope_scaling=scaling,
        mla=LatentAttentionConfig(
            q_lora_rank=q_lora_rank,
            kv_lora_rank=10,
            qk_head_dim=6,
            qk_pos_emb_head_dim=4,
            v_head_dim=8,
        ),
        moe=moe,
    )  # type: ignore[arg-type]
    return model, config


V2_EXPERTS: dict[str, Any] = {
    "router_topk": 2,
    "router_pre_softmax": True,
    "router_topk_scaling_factor": 1.5,
}
V3_EXPERTS: dict[str, Any] = {
    "router_topk": 4,
    "router_score_function": "sigmoid",
    "router_num_groups": 4,
    "router_group_topk": 2,
    "router_topk_scaling_factor": 2.5,
    "router_enable_expert_bias": True,
    "router_load_balancing_type": "none",
}
GROUPS = {"router_num_groups": 4, "router_group_topk": 2}
FAMILIES: dict[str, Callable[[], tuple[nn.Module, TransformerConfig]]] = {
    "v2-lite": lambda: deepseek("V2", None),
    "v2": lambda: deepseek("V2", 9, YARN),
    "v2-sharp": lambda: deepseek("V2", 9, SHARP),
    "v3": lambda: deepseek("V3", 9),
    "v3-lite": lambda: deepseek("V3", None, YARN),
    "v3-sharp": lambda: deepseek("V3", 9, SHARP),
    "v2-experts": lambda: deepseek("V2", 9, SHARP, **V2_EXPERTS),
    # The sum of one expert's score, by which ours rank groups, is theirs of the best one.
    "v2-groups": lambda: deepseek("V2", 9, SHARP, **V2_EXPERTS, **GROUPS),
    "v3-experts": lambda: deepseek("V3", 9, SHARP, **V3_EXPERTS),
}


def perturb(model: nn.Module) -> None:
    """Give every parameter and bias a value that shows whether it is used."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_equal_hugging_face(family: str) -> None:
    torch.manual_seed(0)
    theirs, config = FAMILIES[family]()
    theirs.eval()
    perturb(theirs)
    ours = GPTModel(config)
    ours.load_state_dict(from_deepseek(theirs.state_dict(), config))
    tokens = torch.randint(VOCABULARY, (3, 17))
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
    expected = from_deepseek(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config
    )
    actual = {name: p.grad for name, p in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error}"


def choose_by_best_of_group(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Choose experts as DeepSeek-V2, which ranks groups by their best expert's score."""
    grouped = scores.unflatten(1, (moe.router_num_groups or 1, -1))
    allowed = grouped.amax(-1).topk(moe.router_group_topk or 1, dim=-1).indices
    kept = F.one_hot(allowed, grouped.shape[1]).sum(1).bool()
    ranked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return ranked.topk(moe.router_topk, -1).indices


def test_a_routers_choice_can_be_that_of_deepseek_v2() -> None:
    """Four experts of two groups: by their sum, ours choose others."""
    torch.manual_seed(0)
    theirs, config = deepseek("V2", 9, **V2_EXPERTS | GROUPS | {"router_topk": 4})
    theirs.eval()
    perturb(theirs)
    ours = GPTModel(config)
    ours.load_state_dict(from_deepseek(theirs.state_dict(), config))
    tokens = torch.randint(VOCABULARY, (3, 16))
    expected = theirs(tokens, use_cache=False).logits
    assert not torch.allclose(ours(tokens), expected, atol=1e-3)
    for module in ours.modules():
        if isinstance(module, Router):
            module.choose = choose_by_best_of_group
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)


STEPS, BATCH, SEQUENCE = 3, 4, 16
ZB = {"pipeline_schedule": "zb-h1"}
NO_SP = {"sequence_parallel": False}
GATHER = {"context_options": ContextOptions(cp_comm_type="all_gather")}
HEADS = {"context_options": ContextOptions(cp_comm_type="a2a")}
LEVELS = {
    "context_options": ContextOptions(
        cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2]
    )
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {TP: 2}),
    "tp2-no-sp": (2, {TP: 2, **NO_SP}),
    "tp2-recompute": (2, {TP: 2, "recompute": RECOMPUTE["uniform"]}),
    "tp2-selective": (2, {TP: 2, "recompute": RECOMPUTE["selective"]}),
    "pp2": (2, {PP: 2, MICRO: 1}),
    "cp2": (2, {CP: 2}),
    "cp2-gather": (2, {CP: 2, **GATHER}),
    "cp2-a2a": (2, {CP: 2, **HEADS}),
    "dp2-fsdp": (2, {"data_parallel": "fsdp"}),
    "tp4": (4, {TP: 4}),
    "tp2-dp2": (4, {TP: 2}),
    "tp2-fsdp2": (4, {TP: 2, "data_parallel": "fsdp"}),
    "tp2-pp2": (4, {TP: 2, PP: 2, MICRO: 1}),
    "tp2-pp2-zb": (4, {TP: 2, PP: 2, MICRO: 1, **ZB}),
    "tp2-pp2-zb-no-sp": (4, {TP: 2, PP: 2, MICRO: 1, **ZB, **NO_SP}),
    "pp2-vpp2-dp2": (4, {PP: 2, VPP: 2, MICRO: 1}),
    "tp2-cp2": (4, {TP: 2, CP: 2}),
    "tp2-cp2-no-sp": (4, {TP: 2, CP: 2, **NO_SP}),
    "tp2-cp2-gather": (4, {TP: 2, CP: 2, **GATHER}),
    "tp2-cp2-a2a": (4, {TP: 2, CP: 2, **HEADS}),
    "cp4-levels": (4, {CP: 4, **LEVELS}),
    "tp2-cp2-pp2": (8, {TP: 2, CP: 2, PP: 2, MICRO: 1}),
    "tp2-cp2-dp2": (8, {TP: 2, CP: 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-tp2": (2, {EP: 2, TP: 2, ETP: 1}),
    "ep2-cp2": (2, {EP: 2, CP: 2}),
    "ep2-tp2-pp2-zb": (4, {EP: 2, TP: 2, PP: 2, MICRO: 1, ETP: 1, **ZB}),
    "ep2-tp2-cp2": (4, {EP: 2, TP: 2, CP: 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"qk_layernorm": True, "rope_scaling": SHARP},
    "wide": {},
    "window": {"qk_layernorm": True, "window_size": (5, 0), "normalization": "LayerNorm"},
    "experts": {
        "qk_layernorm": True,
        "moe": MoEConfig(
            num_experts=8, ffn_hidden_size=12, shared_expert_intermediate_size=24,
            layer_freq=(0, 1, 1, 1), **V3_EXPERTS,
        ),
    },
}  # fmt: skip
LATENTS = {
    "narrow": LatentAttentionConfig(
        q_lora_rank=14, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8
    ),
    # Values are padded in one, queries and keys in the other.
    "wide": LatentAttentionConfig(
        q_lora_rank=None, kv_lora_rank=10, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=9
    ),
}
SPREAD = {
    "narrow": ["tp2", "cp2", "tp2-pp2-zb"],
    "window": ["cp2"],
    "experts": ["ep2-tp2"],
}


def _config(model: str) -> TransformerConfig:
    return tiny_config(
        num_layers=4,
        hidden_size=30,
        vocab_size=VOCABULARY,
        ffn_hidden_size=48,
        mla=LATENTS.get(model, LATENTS["narrow"]),
        **MODELS[model],
    )


def _layouts(model: str) -> dict[str, tuple[int, dict[str, Any]]]:
    return EXPERT_LAYOUTS if model == "experts" else LAYOUTS


def _rows() -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (STEPS * BATCH, SEQUENCE + 1), generator=generator)
    return [{"tokens": t[:-1], "labels": t[1:]} for t in text]


def _train(
    model: str,
    options: dict[str, Any] | None,
    replicas: int = 1,
    *,
    steps: int = STEPS,
    start: str | None = None,
    end: str | None = None,
) -> Any:
    # AdamW amplifies the last bits of small gradients in the first steps.
    module = GPTLightningModule(_config(model), learning_rate=1e-3)
    loader = DataLoader(_rows(), batch_size=BATCH // replicas)
    run = fit(options, module, loader, steps=steps, ckpt_path=start)
    if end is not None:
        run.trainer.save_checkpoint(end)
    return run.losses, run.norms


def _train_all(model: str, cases: list[Any]) -> list[Any]:
    return [_train(model, *case) for case in cases]


@cache
def _one(model: str) -> Any:
    return run_ranks(1, _train, model, None)[0]


@pytest.mark.spread(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        *(pytest.param(model, names, id=model) for model, names in SPREAD.items()),
        *(
            pytest.param(model, list(_layouts(model)), id=f"{model}-all", marks=pytest.mark.slow)
            for model in MODELS
        ),
    ],
)
def test_training_equals_one_process(model: str, names: list[str]) -> None:
    """Losses and gradient norms; fp32, sums in another order: 1e-5."""
    losses, norms = _one(model)
    layouts = _layouts(model)
    for world in (2, 4, 8):
        chosen = [name for name in names if layouts[name][0] == world]
        cases = []
        for name in chosen:
            options = layouts[name][1]
            size = options.get(TP, 1) * options.get(PP, 1) * options.get(CP, 1)
            cases.append((options, world // size))
        ranks = run_ranks(world, _train_all, model, cases, timeout_s=380) if cases else []
        for index, name in enumerate(chosen):
            for rank in ranks:
                found = rank[index]
                assert found[1] == pytest.approx(norms, rel=1e-5), name
                if cases[index][1] == 1:
                    assert found[0] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["narrow", "wide"])
def test_a_checkpoint_resumes_on_another_layout(model: str, tmp_path: Path) -> None:
    expected, _ = run_ranks(1, _train, model, None)[0]
    middle, last = str(tmp_path / "middle.ckpt"), str(tmp_path / "last.ckpt")
    found: list[float] = []
    for world, options, steps, start, end in (
        (2, {TP: 2}, 1, None, middle),
        (2, {CP: 2}, 2, middle, last),
        (4, {TP: 2, PP: 2, MICRO: 1}, STEPS, last, None),
    ):
        run = partial(_train, steps=steps, start=start, end=end)
        found += run_ranks(world, run, model, options)[0][0]
    assert found == pytest.approx(expected, rel=1e-5)
