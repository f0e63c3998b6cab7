"""Several ranks that share one GPU.

NCCL gives a communicator two ranks on one GPU since 2.30, where ``NCCL_MULTI_RANK_GPU_ENABLE`` is
1. An older NCCL refuses, and then the ranks exchange tensors of the GPU through gloo.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.gpu.against_cpu import NEEDS_GPU, NORM_RTOL, RTOL, STEPS, accelerators, device
from tests.helpers.layouts import tiny_config, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(180)]

BATCH, SEQUENCE, VOCABULARY = 4, 16, 64
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP = "context_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp2": (1, {TP: 2}, ("all_gather", "reduce_scatter")),
    "dp2-zero1": (2, {"data_parallel": "zero1"}, ("all_gather", "reduce_scatter")),
    "dp2-ddp": (2, {"data_parallel": "ddp"}, ("all_reduce",)),
    "dp2-fsdp": (2, {"data_parallel": "fsdp"}, ("all_gather", "reduce_scatter")),
    "pp2": (1, {PP: 2, "micro_batch_size": 2}, ("send",)),
    "cp2": (1, {CP: 2}, ("send",)),
}
"""Data-parallel ranks, options of the strategy, and communication of tensors on the GPU."""
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


def _communicate(backend: str, store: str, device: str, notes: str) -> None:
    """Try the kinds of communication one after another; note what each says."""
    rank, _ = _connect(backend, store)
    x, both = torch.ones(4, device=device), torch.ones(8, device=device)

    def send() -> None:
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)

    kinds: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(both, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, both),
        "send": send,
    }
    for name, call in kinds.items():
        try:
            call()
            fault = ""
        except (RuntimeError, ValueError, NotImplementedError) as error:
            fault = str(error).splitlines()[0]
        if rank == 0:
            with Path(notes).open("a") as file:
                file.write(f"{name}\t{fault}\n")


def _backend() -> str:
    version = torch.cuda.nccl.version() if torch.cuda.is_available() else (0,)  # type: ignore[no-untyped-call]
    return "cpu:gloo,cuda:nccl" if tuple(version) >= (2, 30) else "gloo"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the kinds of communication that work, and what others say. A kind that is missing
    ended the process."""
    folder = tmp_path_factory.mktemp("communication")
    notes = folder / "notes"
    notes.touch()
    store, where = str(folder / "store"), str(device())
    with contextlib.suppress(AssertionError):
        run_ranks(2, _communicate, _backend(), store, where, str(notes), timeout_s=60)
    lines = (line.partition("\t") for line in notes.read_text().splitlines())
    return {name: fault for name, _, fault in lines}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_on_one_gpu(name: str, faults: dict[str, str], tmp_path: Path) -> None:
    replicas, options, needed = LAYOUTS[name]
    for kind in needed:
        if fault := faults.get(kind, "the process ended"):
            pytest.skip(f"{_backend()} of torch {torch.__version__}, {kind} on one GPU: {fault}")
    losses, norms = _train("cpu", 1, {})
    ranks = run_ranks(
        2, _on_a_shared_gpu, _backend(), str(tmp_path / "store"), accelerators()[1], replicas,
        options, timeout_s=60,
    )  # fmt: skip
    own = [sum(step) / len(step) for step in zip(*(rank[0] for rank in ranks), strict=True)]
    assert own == pytest.approx(losses, rel=RTOL)
    for rank in ranks:
        assert rank[1] == pytest.approx(norms, rel=NORM_RTOL)
