"""A curve of the real Megatron-Core, in one process on a CPU.

    pip install --no-deps --target FOLDER megatron-core==0.16.1
    PYTHONPATH=.:FOLDER python -m benchmarks.curves megatron

Model, optimizer, clipping and schedule are Megatron-Core's own, unchanged; calls of CUDA are
answered by a CPU. The weights are those of the folder, and norms have no weight decay, as its
scheduler says.
"""

from __future__ import annotations

import importlib
import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.curves import Contract


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def make_model(contract: Contract) -> Any:
    """Return the GPTModel of the contract."""
    config = _core("transformer.transformer_config").TransformerConfig(
        num_layers=contract.num_layers, hidden_size=contract.hidden_size,
        ffn_hidden_size=contract.ffn_hidden_size, num_attention_heads=contract.num_heads,
        use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=F.silu, normalization="RMSNorm", layernorm_epsilon=1e-6,
        attention_dropout=contract.dropout, hidden_dropout=contract.dropout,
        pipeline_dtype=torch.float32, persist_layer_norm=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
        apply_rope_fusion=False,
    )  # fmt: skip
    spec = _core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization="RMSNorm")
    return _core("models.gpt").GPTModel(
        config, spec, contract.vocab_size, 2 * contract.length,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip


def weights_of(folder: str, contract: Contract) -> dict[str, Tensor]:
    """Return a Llama's weights under Megatron-Core's names: query, key and value by head, gate
    above up.
    """
    llama = load_file(f"{folder}/model.safetensors")
    weights = {
        "embedding.word_embeddings.weight": llama["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": llama["model.norm.weight"],
        "output_layer.weight": llama["lm_head.weight"],
    }
    size = contract.hidden_size // contract.num_heads
    for layer in range(contract.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        by_head = [
            llama[f"{theirs}self_attn.{name}_proj.weight"].view(contract.num_heads, size, -1)
            for name in "qkv"
        ]
        gate_up = [llama[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        weights |= {
            f"{ours}input_layernorm.weight": llama[f"{theirs}input_layernorm.weight"],
            f"{ours}pre_mlp_layernorm.weight": llama[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(by_head, dim=1).flatten(0, 1),
            f"{ours}self_attention.linear_proj.weight": llama[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{ours}mlp.linear_fc2.weight": llama[f"{theirs}mlp.down_proj.weight"],
        }
    return weights


def optimizer_of(contract: Contract, parallel: Any) -> tuple[Any, Any]:
    """Return Megatron-Core's optimizer and its scheduler."""
    settings = _core("optimizer").OptimizerConfig(
        optimizer="adam", lr=contract.peak_lr, min_lr=contract.min_lr, clip_grad=contract.clip,
        adam_beta1=contract.betas[0], adam_beta2=contract.betas[1], adam_eps=contract.eps,
        weight_decay=contract.weight_decay, params_dtype=torch.float32,
    )  # fmt: skip
    optimizer = _core("optimizer").get_megatron_optimizer(settings, [parallel])
    scheduler = _core("optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=contract.peak_lr, min_lr=contract.min_lr,
        lr_warmup_steps=contract.warmup_steps, lr_decay_steps=contract.steps,
        lr_decay_style="cosine", start_wd=contract.weight_decay, end_wd=contract.weight_decay,
        wd_incr_steps=contract.steps, wd_incr_style="constant",
    )  # fmt: skip
    return optimizer, scheduler


def train(
    contract: Contract, folder: str, rows: Tensor
) -> tuple[list[float], float, dict[str, str]]:
    """Train; return losses, processor seconds and the version."""
    from tests.helpers.record_torch_dist import answer_for_cuda

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = dist.FileStore(f"{folder}.store", 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    answer_for_cuda()
    begin = time.process_time()
    _core("parallel_state").initialize_model_parallel()
    _core("tensor_parallel").model_parallel_cuda_manual_seed(1)
    model = make_model(contract)
    model.load_state_dict(weights_of(folder, contract), strict=False)
    expected = {name for name, _ in model.named_parameters()}
    if expected != weights_of(folder, contract).keys():
        raise ValueError(f"the folder's weights are not those of Megatron-Core: {expected}.")
    ddp = _core("distributed")
    parallel = ddp.DistributedDataParallel(model.config, ddp.DistributedDataParallelConfig(), model)
    optimizer, scheduler = optimizer_of(contract, parallel)
    positions = torch.arange(contract.length).expand(contract.rows, -1)
    mask = torch.ones(1, 1, contract.length, contract.length).triu(1).bool()
    losses = []
    for batch in rows.split(contract.rows):
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss = parallel(batch[:, :-1], positions, mask, labels=batch[:, 1:]).mean()
        loss.backward()
        parallel.finish_grad_sync()
        optimizer.step()
        scheduler.step(increment=1)
        losses.append(float(loss.detach()))
    return losses, time.process_time() - begin, {"megatron-core": version("megatron-core")}
