"""Several ranks that share one GPU.

NCCL gives a communicator two ranks on one GPU since 2.30, where ``NCCL_MULTI_RANK_GPU_ENABLE`` is
1. An older NCCL refuses, and then the ranks exchange tensors of the GPU through gloo. A budgeted
run probes which of both works, and says so in :data:`benchmarks.gpu.probe.CHOICE`.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.gpu.probe import CHOICE, SHARED
from megatron_lightning.config import DataParallelOptions, MoEConfig
from megatron_lightning.models import GPTModel, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.gpu.against_cpu import NEEDS_GPU, NORM_RTOL, RTOL, STEPS, accelerators
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import tiny_config, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses
from tests.lightning.precision.test_fp8_parameters import Seen

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(180)]

BATCH, SEQUENCE, VOCABULARY = 4, 16, 64
CONFIG = tiny_config(vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
EXPERTS = tiny_config(
    vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, moe=MoEConfig(num_experts=4)
)
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
FSDP = {"data_parallel": "fsdp"}
RESHARD = DataParallelOptions(reshard_after_forward=True)
EVERY = DataParallelOptions(reduce_every_microbatch=True)
OVERLAP = DataParallelOptions(overlap_param_gather=True)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-zero1": (2, {"data_parallel": "zero1"}),
    "dp2-overlap": (2, {"data_parallel": "zero1", "data_parallel_options": OVERLAP}),
    "dp2-ddp": (2, {"data_parallel": "ddp"}),
    "dp2-fsdp": (2, FSDP),
    "dp2-fsdp-micro": (2, {**FSDP, "micro_batch_size": 1, "data_parallel_options": EVERY}),
    "dp2-fsdp-reshard": (2, {**FSDP, "data_parallel_options": RESHARD}),
    "dp2-fsdp-recompute": (2, {**FSDP, "recompute": RECOMPUTE["uniform"]}),
    "tp2": (1, {TP: 2}),
    "pp2": (1, {PP: 2, "micro_batch_size": 2}),
    "cp2": (1, {CP: 2}),
    "ep2": (2, {"data_parallel": "zero1", EP: 2}),
}
"""Data-parallel ranks and options of the strategy. gloo refuses those of one data-parallel rank."""


class Result(NamedTuple):
    """What a rank found."""

    losses: list[float]
    norms: list[float]
    used: dict[str, Any]
    """What the rank divided, after its last step."""


class _Used(Seen):
    """Sees what a rank divides: a layout that divides nothing would equal the CPU as well."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any
    ) -> None:
        super().on_train_batch_end(trainer, module, *arguments)
        strategy: Any = trainer.strategy
        reducer = strategy.run.training.accumulation.reducer
        parameters = list(module.parameters())
        self.facts = {
            "device": strategy.root_device.type,
            "ranks": trainer.world_size,
            "replicas": strategy.distributed_sampler_kwargs["num_replicas"],
            "parameters": sum(p.numel() for p in parameters),
            "FSDP2": any(isinstance(p, DTensor) for p in parameters),
            "sharded": any(bucket.sharded for bucket in reducer.buckets),
            "gathering": any(bucket.gathering is not None for bucket in reducer.buckets),
            "codes": self.num_codes,
            "gathered": self.gathered[-2],
        }


def _train(
    accelerator: str,
    replicas: int,
    options: dict[str, Any],
    num_nodes: int = 1,
    recipe: FP8Recipe | None = None,
    config: TransformerConfig = CONFIG,
) -> Result:
    """Train as one rank of ``num_nodes`` nodes with one device each."""
    pl.seed_everything(3, verbose=False)
    module = GPTLightningModule(config, learning_rate=1e-3)
    module.configure_model()
    rows: Any = token_rows(STEPS * BATCH, SEQUENCE, VOCABULARY)
    record, used = Losses(), _Used()
    plugins = [] if recipe is None else [MegatronFP8Precision(recipe, backend="emulation")]
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**options), accelerator=accelerator, devices=1,
        num_nodes=num_nodes, max_steps=STEPS, callbacks=[record, used], gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, plugins=plugins, deterministic=recipe is not None,
    )  # fmt: skip
    with used.counting():
        trainer.fit(module, DataLoader(rows, batch_size=BATCH // replicas))
    return Result(record.losses, record.norms, used.facts)


def _connect(backend: str, store: str) -> tuple[int, int]:
    """Connect the ranks by ``backend``; return rank and number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if backend != "gloo":
        dist.destroy_process_group()
        os.environ.update({**SHARED, **os.environ})  # the probe may have set more
        torch.cuda.set_device(0)
        shared = dist.FileStore(store, size)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size)
    return rank, size


def _on_a_shared_gpu(
    backend: str,
    store: str,
    accelerator: str,
    replicas: int,
    options: dict[str, Any],
    recipe: FP8Recipe | None = None,
    config: TransformerConfig = CONFIG,
) -> Result:
    """Train as one of two nodes, of which each has the same GPU."""
    rank, size = _connect(backend, store)
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
        GROUP_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )  # fmt: skip
    return _train(accelerator, replicas, options, size, recipe, config)


def _nccl_version() -> int:
    """Return the version of the NCCL that is loaded, such as 23007. torch's own number is of the
    NCCL that torch was built with."""
    version = ctypes.c_int()
    if torch.cuda.is_available():
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def _backend() -> str:
    choice = os.environ.get(CHOICE) or ("nccl" if _nccl_version() >= 23000 else "gloo")
    return "cpu:gloo,cuda:nccl" if choice == "nccl" else "gloo"


def _assert_in_use(
    used: dict[str, Any], replicas: int, options: dict[str, Any], config: TransformerConfig
) -> None:
    """Fail where a rank has divided nothing of what the layout names."""
    device = "cuda" if accelerators()[1] == "gpu" else "cpu"
    assert (used["device"], used["ranks"], used["replicas"]) == (device, 2, replicas)
    with torch.device("meta"):
        full = sum(p.numel() for p in GPTModel(config).parameters())
    assert (used["parameters"] < full) == bool({TP, PP, EP} & options.keys())
    data_parallel = options.get("data_parallel", "zero1")
    assert used["FSDP2"] == (data_parallel == "fsdp")
    assert used["sharded"] == (data_parallel == "zero1" and (replicas == 2 or CP in options))
    assert used["gathering"] == (options.get("data_parallel_options") == OVERLAP)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_on_one_gpu(name: str, tmp_path: Path) -> None:
    replicas, options = LAYOUTS[name]
    config = EXPERTS if EP in options else CONFIG
    losses, norms, _ = _train("cpu", 1, {}, config=config)
    start = partial(
        run_ranks, 2, _on_a_shared_gpu, _backend(), str(tmp_path / "store"), accelerators()[1],
        replicas, options, None, config, timeout_s=60,
    )  # fmt: skip
    if replicas == 1 and _backend() == "gloo" and accelerators()[1] == "gpu":
        with pytest.raises(AssertionError, match="gloo sends nothing from the memory of a GPU"):
            start()
        pytest.skip(f"NCCL {_nccl_version()} takes no two ranks here, and gloo is refused")
    ranks = start()
    own = [sum(step) / len(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    assert own == pytest.approx(losses, rel=RTOL)
    for rank in ranks:
        assert rank.norms == pytest.approx(norms, rel=NORM_RTOL)
        _assert_in_use(rank.used, replicas, options, config)


@pytest.mark.parametrize("data_parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise"])
def test_weights_gathered_as_8_bits(scaling: Any, data_parallel: str, tmp_path: Path) -> None:
    """Losses are those of weights in fp32, bit by bit: the codes are those of the full weights. The
    gathers have fewer bytes; embeddings and norms stay in fp32."""
    runs = []
    for coded in (True, False):
        recipe = FP8Recipe(scaling=scaling, fp8_param_gather=coded, stochastic_rounding=False)
        options, store = {"data_parallel": data_parallel}, str(tmp_path / f"{coded}")
        ranks = (_backend(), store, accelerators()[1], 2, options, recipe)
        runs.append(run_ranks(2, _on_a_shared_gpu, *ranks, timeout_s=80))
    for own, other in zip(*runs, strict=True):
        assert own.losses == other.losses
        assert own.used["gathered"] < 0.8 * other.used["gathered"]
        # FSDP2 has the main params between steps.
        assert (own.used["codes"] > 0) == (data_parallel == "zero1") and not other.used["codes"]
        assert own.used["FSDP2"] == (data_parallel == "fsdp") and own.used["ranks"] == 2
