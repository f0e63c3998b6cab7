"""Record checkpoints and logits of the real Megatron-Core, on gloo ranks without a GPU.

    pip install --no-deps --target FOLDER megatron-core==0.16.1
    PYTHONPATH=FOLDER python -m tests.helpers.record_torch_dist

Writes ``torch_dist.tar.xz`` in ``tests/oracles``: for every case a ``torch_dist`` checkpoint as
Megatron-LM lays it out, saved by four ranks after an optimizer step, and the logits of the model
that one process of Megatron-Core loads from the checkpoint. Megatron-Core itself is unchanged.
Calls of CUDA are answered by a CPU.
"""

from __future__ import annotations

import importlib
import io
import os
import tarfile
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

TARGET = Path(__file__).parent.parent / "oracles/torch_dist.tar.xz"
VOCABULARY, PADDED, LENGTH, STEP = 61, 64, 12, 7
_SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 4, "use_cpu_initialization": True,
    "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu,
    "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "init_method_std": 0.3,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "pipeline_dtype": torch.float32,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False, "masked_softmax_fusion": False, "bias_activation_fusion": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 12, "moe_layer_freq": [0, 1, 1, 1],
}  # fmt: skip
CASES: Mapping[str, dict[str, Any]] = {
    # weights in bf16, a vocabulary with padding, main params and moments of the sharded optimizer
    "dense": {"ranks": {"tensor": 2, "pipeline": 2}, "bf16": True},
    # stacked experts, a tied output layer
    "experts": {"ranks": {"pipeline": 2, "expert": 2}, "tied": True, "config": _EXPERTS},
    # layers of two kinds, so that every layer has keys of its own
    "uneven": {
        "ranks": {"tensor": 2, "pipeline": 2},
        "config": {
            **_EXPERTS, **_SHARED, "moe_shared_expert_gate": True, "add_qkv_bias": True,
            "moe_router_pre_softmax": True,
        },
    },
    # latent attention, biases of experts, a layer of multi-token prediction
    "latent": {
        "ranks": {"pipeline": 1},
        "latent": True,
        "config": {
            **_EXPERTS, **_SHARED, "num_query_groups": 4, "kv_channels": None, "q_lora_rank": 9,
            "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
            "rope_type": "rope", "rotary_base": 10000.0, "qk_layernorm": True,
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2, "moe_router_group_topk": 1, "mtp_num_layers": 1,
            "moe_router_topk_scaling_factor": 2.5, "apply_rope_fusion": False,
        },
    },
}  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Make on the CPU what is asked for on a CUDA device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device", "")):
            options["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **options)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class Attention(torch.nn.Module):
    """Attention whose values have another size than its keys, which Megatron-Core leaves to
    Transformer Engine.
    """

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the context [s, b, n * d] of heads [s, b, n, d]."""
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return context.permute(2, 0, 1, 3).flatten(2)


def answer_for_cuda() -> None:
    """Make this process answer Megatron-Core's calls of CUDA."""
    warnings.filterwarnings("ignore")
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: None
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    experts = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    experts.te_general_gemm = None  # without Transformer Engine the name is missing
    latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    latent.TELinear = OnCpu  # the same
    OnCpu().__enter__()


def make_model(case: str, *, alone: bool, dtype: torch.dtype | None = None) -> Any:
    """Return this rank's part of a case's model.

    Args:
        case: The case.
        alone: Whether one process has the full model.
        dtype: Dtype of the weights. None: the case's.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    gpt = importlib.import_module("megatron.core.models.gpt")
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    own = CASES[case]
    ranks = {} if alone else own["ranks"]
    expert = ranks.get("expert", 1)
    sizes = {
        "tensor_model_parallel_size": ranks.get("tensor", 1),
        "pipeline_model_parallel_size": ranks.get("pipeline", 1),
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": 1 if expert > 1 else None,
    }
    state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    is_latent = own.get("latent", False)
    config_class = configs.MLATransformerConfig if is_latent else configs.TransformerConfig
    is_bf16 = own.get("bf16", False) and dtype is None
    options = {**_SIZES, **own.get("config", {}), **sizes, "bf16": is_bf16}
    if is_bf16:
        options |= {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = config_class(**{k: v for k, v in options.items() if v is not None})
    experts = options.get("num_moe_experts")
    if experts is None:
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    else:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if is_latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    mtp = None
    if options.get("mtp_num_layers"):
        mtp = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = gpt.GPTModel(
        config, spec, PADDED, 32,
        pre_process=state.is_pipeline_first_stage(), post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=own.get("tied", False), position_embedding_type="rope",
        mtp_block_spec=mtp,
    )  # fmt: skip
    with torch.no_grad():  # norms and biases show, too
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 1:
                generator = torch.Generator().manual_seed(sum(map(ord, name.split(".")[-2])))
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.3)
    return model.bfloat16() if is_bf16 else model


def metadata() -> dict[str, Any]:
    """Return what a state dict of Megatron-Core is asked for, as Megatron-LM asks for it."""
    state = importlib.import_module("megatron.core.parallel_state")
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": state.get_data_parallel_group(with_context_parallel=True),
    }


def _save(case: str, folder: Path) -> None:
    """Train a step, and save as Megatron-LM does: model, optimizer, and the rest."""
    saving = importlib.import_module("megatron.core.dist_checkpointing")
    optimizers = importlib.import_module("megatron.core.optimizer")
    ddp = importlib.import_module("megatron.core.distributed")
    model = make_model(case, alone=False)
    is_bf16 = CASES[case].get("bf16", False)
    parallel = ddp.DistributedDataParallel(
        model.config, ddp.DistributedDataParallelConfig(use_distributed_optimizer=is_bf16), model
    )
    settings = optimizers.OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=is_bf16, bf16=is_bf16, clip_grad=0.0,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )  # fmt: skip
    optimizer = optimizers.get_megatron_optimizer(settings, [parallel])
    torch.manual_seed(3)
    for parameter in parallel.parameters():
        if parameter.requires_grad:
            parameter.main_grad.normal_()
    optimizer.step()
    sharded = model.sharded_state_dict(metadata=metadata())
    state = {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata()),
        "iteration": STEP,
        "checkpoint_version": 3.0,
    }
    path = folder / f"iter_{STEP:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    saving.save(state, str(path))
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))


def load(case: str, checkpoint: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the full model that Megatron-Core loads from a checkpoint, in one process."""
    loading = importlib.import_module("megatron.core.dist_checkpointing")
    model = make_model(case, alone=True, dtype=dtype)
    sharded = {"model": model.sharded_state_dict(metadata=metadata())}
    loaded = loading.load(sharded, str(checkpoint))
    model.load_state_dict(loaded["model"])
    return model.eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits [b, s, v] of :func:`tokens`, without padding."""
    batch = tokens()
    positions = torch.arange(LENGTH).expand_as(batch)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    model.mtp_process, model.config.mtp_num_layers = False, None  # its losses need labels
    logits: torch.Tensor = model(batch, positions, mask)
    return logits[..., :VOCABULARY].float().contiguous()


def tokens() -> torch.Tensor:
    """Return the tokens [2, s] of the recorded logits."""
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def _run(rank: int, size: int, case: str, folder: str, saves: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{case}.{'save' if saves else 'load'}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    answer_for_cuda()
    path = Path(folder) / case
    if saves:
        _save(case, path)
    else:
        logits = logits_of(load(case, path / f"iter_{STEP:07d}"))
        save_file({"logits": logits}, path / "logits.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Record every case."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(TARGET, "w:xz") as archive:
        for case, own in CASES.items():
            size = 4 if max(own["ranks"].values()) > 1 else 1
            for ranks, saves in ((size, True), (1, False)):
                torch.multiprocessing.spawn(_run, (ranks, case, folder, saves), nprocs=ranks)
            for file in sorted((Path(folder) / case).rglob("*")):
                if file.is_file():
                    content = file.read_bytes()
                    entry = tarfile.TarInfo(str(file.relative_to(folder)))
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                    print(f"{entry.name}: {entry.size:,} bytes")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":  # the checkpoint's writer starts processes that import this file
    main()
