"""Several ranks that share one GPU.

NCCL gives a communicator two ranks on one GPU since 2.30, where ``NCCL_MULTI_RANK_GPU_ENABLE`` is
1. An older NCCL refuses, and then the ranks exchange tensors of the GPU through gloo.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.gpu.against_cpu import NEEDS_GPU, NORM_RTOL, RTOL, STEPS, accelerators
from tests.helpers.layouts import tiny_config, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(180)]

BATCH, SEQUENCE, VOCABULARY = 4, 16, 64
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP = "context_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-zero1": (2, {"data_parallel": "zero1"}),
    "dp2-ddp": (2, {"data_parallel": "ddp"}),
    "dp2-fsdp": (2, {"data_parallel": "fsdp"}),
    "tp2": (1, {TP: 2}),
    "pp2": (1, {PP: 2, "micro_batch_size": 2}),
    "cp2": (1, {CP: 2}),
}
"""Data-parallel ranks and options of the strategy. gloo refuses those of one data-parallel rank."""
Result = tuple[list[float], list[float]]


def _train(accelerator: str, replicas: int, options: dict[str, Any], num_nodes: int = 1) -> Result:
    """Train as one rank of ``num_nodes`` nodes with one device each."""
    pl.seed_everything(3, verbose=False)
    module = GPTLightningModule(
        tiny_config(vocab_size=VOCABULARY, max_sequence_length=SEQUENCE), learning_rate=1e-3
    )
    module.configure_model()
    rows: Any = token_rows(STEPS * BATCH, SEQUENCE, VOCABULARY)
    record = Losses()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**options), accelerator=accelerator, devices=1,
        num_nodes=num_nodes, max_steps=STEPS, callbacks=[record], gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=BATCH // replicas))
    return record.losses, record.norms


def _connect(backend: str, store: str) -> tuple[int, int]:
    """Connect the ranks by ``backend``; return rank and number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if backend != "gloo":
        dist.destroy_process_group()
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        torch.cuda.set_device(0)
        shared = dist.FileStore(store, size)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size)
    return rank, size


def _on_a_shared_gpu(
    backend: str, store: str, accelerator: str, replicas: int, options: dict[str, Any]
) -> Result:
    """Train as one of two nodes, of which each has the same GPU."""
    rank, size = _connect(backend, store)
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
        GROUP_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )  # fmt: skip
    return _train(accelerator, replicas, options, num_nodes=size)


def _backend() -> str:
    version = torch.cuda.nccl.version() if torch.cuda.is_available() else (0,)  # type: ignore[no-untyped-call]
    return "cpu:gloo,cuda:nccl" if tuple(version) >= (2, 30) else "gloo"


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_on_one_gpu(name: str, tmp_path: Path) -> None:
    replicas, options = LAYOUTS[name]
    losses, norms = _train("cpu", 1, {})
    start = partial(
        run_ranks, 2, _on_a_shared_gpu, _backend(), str(tmp_path / "store"), accelerators()[1],
        replicas, options, timeout_s=60,
    )  # fmt: skip
    if replicas == 1 and _backend() == "gloo" and accelerators()[1] == "gpu":
        with pytest.raises(AssertionError, match="gloo sends nothing from the memory of a GPU"):
            start()
        pytest.skip(f"torch {torch.__version__} has an NCCL below 2.30, and gloo is refused")
    ranks = start()
    own = [sum(step) / len(step) for step in zip(*(rank[0] for rank in ranks), strict=True)]
    assert own == pytest.approx(losses, rel=RTOL)
    for rank in ranks:
        assert rank[1] == pytest.approx(norms, rel=NORM_RTOL)
