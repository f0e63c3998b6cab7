"""Models of ours train on a GPU as on the CPU, layer by layer of every kind."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from megatron_lightning.compat import takes_grouped_mm
from megatron_lightning.config import (
    CompileOptions,
    DeltaNetConfig,
    LatentAttentionConfig,
    MambaConfig,
    MoEConfig,
    TransformerConfig,
)
from megatron_lightning.modules import GPTLightningModule
from tests.gpu.against_cpu import BF16_RTOL, NEEDS_GPU, STEPS, assert_equals_cpu, device, on_gpu
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import tiny_config, token_rows

pytestmark = NEEDS_GPU

BATCH, SEQUENCE, VOCABULARY = 4, 32, 64
INDUCTOR = "inductor"
"""Compiler of blocks."""
# Rows of whole 16 bytes, which the kernels of grouped products need.
EXPERTS = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=32, aux_loss_coeff=1e-2)
LATENTS = LatentAttentionConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
)
MAMBA = MambaConfig(state_dim=16, head_dim=16, num_groups=1, chunk_size=8)
DELTA_NET = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16, chunk_size=8
)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"num_query_groups": 2, "window_size": (8, 0), "z_loss": 1e-3},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": True,
    },
    "experts": {"moe": EXPERTS},
    "experts-one-by-one": {"moe": MoEConfig(num_experts=4, ffn_hidden_size=32, grouped_gemm=False)},
    "experts-allgather": {
        "moe": MoEConfig(
            num_experts=4, ffn_hidden_size=32, token_dispatcher_type="allgather",
            router_score_function="sigmoid", router_enable_expert_bias=True,
            shared_expert_intermediate_size=32, shared_expert_gate=True,
        )
    },
    "experts-capacity": {
        "moe": MoEConfig(
            num_experts=4, ffn_hidden_size=32, expert_capacity_factor=1.0,
            pad_expert_input_to_capacity=True, z_loss_coeff=1e-3,
        )
    },
    "latent": {"mla": LATENTS, "qk_layernorm": True},
    "latent-experts": {"mla": LATENTS, "moe": EXPERTS},
    "mtp": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5},
    "mamba": {"layer_pattern": "MM", "mamba": MAMBA},
    "delta": {"delta_net": DELTA_NET, "linear_attention_freq": [1, 1]},
    "hybrid": {
        "layer_pattern": "M-G*E", "mamba": MAMBA, "delta_net": DELTA_NET, "moe": EXPERTS,
    },
}  # fmt: skip
STATES = ("mamba", "delta", "hybrid")
DELTA_NETS = ("delta", "hybrid")


def config_of(name: str) -> TransformerConfig:
    """Return the config of a model."""
    return tiny_config(
        hidden_size=64, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, **MODELS[name]
    )


def module_of(name: str) -> GPTLightningModule:
    """Return the module of a model."""
    return GPTLightningModule(config_of(name), learning_rate=1e-3)


def rows(*, packed: bool = False) -> DataLoader[Any]:
    """Return batches of random tokens; ``packed``: three documents share every row."""
    samples = token_rows(STEPS * BATCH, SEQUENCE, VOCABULARY)
    for number, sample in enumerate(samples if packed else ()):
        positions = torch.arange(SEQUENCE)
        sample["document_ids"] = (positions > 5 + number).long() + (positions > 20).long()
    return DataLoader(samples, batch_size=BATCH)


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_cpus(name: str) -> None:
    assert_equals_cpu(lambda: module_of(name), {"micro_batch_size": 2}, rows)


def _assert_bf16_follows_fp32(name: str) -> None:
    rtol = 2 * BF16_RTOL if "experts" in name or name == "hybrid" else BF16_RTOL
    run = on_gpu(lambda: module_of(name), None, rows(), precision="bf16-mixed")
    expected = on_gpu(lambda: module_of(name), None, rows())
    assert run.losses == pytest.approx(expected.losses, rel=rtol)
    # Of the first step, from the same weights: later ones are no continuous function of losses.
    assert run.norms[0] == pytest.approx(expected.norms[0], rel=0.05)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DELTA_NETS])
def test_bf16_mixed_follows_fp32(name: str) -> None:
    """Kernels of bf16 are others: flash attention, grouped products, scans over chunks. Experts
    that are chosen otherwise move a loss by more than rounding does."""
    _assert_bf16_follows_fp32(name)


@pytest.mark.timeout(400)
def test_delta_nets_in_bf16() -> None:
    """Where flash-linear-attention is installed, by kernels that are tuned for minutes at first."""
    for name in DELTA_NETS:
        _assert_bf16_follows_fp32(name)


@pytest.mark.parametrize("name", ["gpt", "latent", *STATES])
def test_documents_that_share_rows(name: str) -> None:
    assert_equals_cpu(lambda: module_of(name), None, lambda: rows(packed=True))


def test_models_are_drawn_on_the_gpu() -> None:
    """By a generator of the GPU, as the strategy builds them: the first losses are those of random
    logits."""
    for name in MODELS:
        run = on_gpu(lambda name=name: module_of(name), None, rows(), built=False, steps=1)
        spread = 0.5 if name in ("delta", "hybrid", "mtp") else 0.2
        assert run.losses[0] == pytest.approx(log(VOCABULARY), rel=spread), name


@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "none"])
@pytest.mark.parametrize("name", ["latent-experts", "hybrid"])
def test_recomputed_layers(name: str, recompute: str) -> None:
    options = {"recompute": RECOMPUTE[recompute], "micro_batch_size": 2}
    assert_equals_cpu(lambda: module_of(name), options, rows, of_cpu={"layout": None})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "backend"), [("gpt", INDUCTOR), ("experts", INDUCTOR), ("hybrid", "aot_eager")]
)
def test_compiled_blocks(name: str, backend: str) -> None:
    """Compiled on the GPU, not on the CPU."""
    options = {"compile": "block", "compile_options": CompileOptions(backend=backend)}
    counters.clear()
    assert_equals_cpu(lambda: module_of(name), options, rows, of_cpu={"layout": None})
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.timeout(300)
def test_compiled_and_recomputed_blocks_in_bf16() -> None:
    options = {
        "compile": "block",
        "compile_options": CompileOptions(backend=INDUCTOR),
        "recompute": RECOMPUTE["uniform"],
    }
    counters.clear()
    run = on_gpu(lambda: module_of("experts"), options, rows(), precision="bf16-mixed")
    assert counters["stats"]["unique_graphs"] > 0
    plain = on_gpu(lambda: module_of("experts"), None, rows(), precision="bf16-mixed")
    assert run.losses == pytest.approx(plain.losses, rel=2 * BF16_RTOL)


def _grouped(x: Tensor, w: Tensor, counts: Tensor, *, one_by_one: bool) -> Tensor:
    out: Tensor = torch.ops.megatron_lightning.grouped_mm(x, w, counts, one_by_one)
    return out


@pytest.mark.parametrize("counts", [[40, 24, 0, 64], [0, 0, 0, 0], [1, 127, 0, 0]])
def test_grouped_products_equal_the_loop(counts: list[int]) -> None:
    """bf16, dropless: also experts without tokens. Sums of 64 and up to 127 products in another
    order, rounded once: 1e-2 of the norm."""
    draw, total = torch.Generator().manual_seed(0), sum(counts)
    x, w, grad = (
        torch.randn(shape, generator=draw).to(device(), torch.bfloat16)
        for shape in ((total, 64), (4, 64, 96), (total, 96))
    )
    assert takes_grouped_mm(w)
    sizes = torch.tensor(counts, device=device())
    for a, b in ((x, w), (grad, w.transpose(1, 2)), (x.t(), grad)):
        found, expected = (_grouped(a, b, sizes, one_by_one=each) for each in (False, True))
        assert found.shape == expected.shape
        difference = (found.float() - expected.float()).norm()
        assert difference <= 1e-2 * expected.float().norm()


def test_qwen3_next_of_a_folder(tmp_path: Path) -> None:
    """Delta nets, gated attention and experts, from the weights of a folder."""
    pytest.importorskip("transformers", "5")
    from tests.helpers.gpt_folders import make_folder

    folder = str(make_folder("qwen3-next", tmp_path))

    def make() -> GPTLightningModule:
        return GPTLightningModule(init_from_hf=folder, learning_rate=1e-3, eps=1e-3)

    vocabulary = make()._bridge().to_config().vocab_size
    samples = token_rows(STEPS * BATCH, 16, vocabulary)
    assert_equals_cpu(make, None, lambda: DataLoader(samples, batch_size=BATCH), built=False)
