"""Settings of CUDA that are read on every machine: options of NCCL, and the queues of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.grid.context import GROUPS
from megatron_lightning.parallel.grid.gpu_queues import (
    VARIABLE,
    check_connections,
    check_exchange,
)
from megatron_lightning.parallel.grid.nccl import (
    NcclOptions,
    communicator_key,
    options_of_communicators,
    read_nccl_options,
)
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks

HOPPER, BLACKWELL = (9, 0), (10, 0)


def _file(folder: Path, text: str) -> Path:
    path = folder / "nccl.yaml"
    path.write_text(text)
    return path


def test_options_of_groups_are_read(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "dp_cp: {max_ctas: 8, is_high_priority_stream: true}\n"
        "tp: {cga_cluster_size: 2, min_ctas: 4, max_ctas: 16, net_name: IB}\n",
    )
    assert read_nccl_options(path, GROUPS) == {
        "dp-cp": NcclOptions(max_ctas=8, is_high_priority_stream=True),
        "tp": NcclOptions(cga_cluster_size=2, min_ctas=4, max_ctas=16, net_name="IB"),
    }
    MegatronStrategy(nccl_communicator_config_path=str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp: {max_ctas: 8}", r"options of 'tpp', and there is no such group\. The groups are dp"),
        (
            "tp: {max_cta: 8}",
            r"sets max_cta for tp, which is unknown\. The options are cga_cluster",
        ),
        ("tp: {max_ctas: 80}", r"tp: max_ctas is 80; it must be from 1 to 64"),
        ("tp: {max_ctas: true}", r"max_ctas is True"),
        ("tp: {cga_cluster_size: 9}", r"cga_cluster_size is 9; it must be from 0 to 8"),
        ("tp: {min_ctas: 9, max_ctas: 8}", r"min_ctas is 9 and max_ctas 8\. Set max_ctas to 9"),
        ("tp: {net_name: 3}", r"net_name is 3"),
        ("tp: {is_high_priority_stream: 2}", r"is_high_priority_stream is 2"),
        ("tp", r"has no options of groups"),
        ("tp: [", r"nccl_communicator_config_path="),
    ],
)
def test_files_that_cannot_work_are_refused_with_the_strategy(
    text: str, message: str, tmp_path: Path
) -> None:
    path = str(_file(tmp_path, text))
    with pytest.raises(ConfigError, match=message):
        MegatronStrategy(nccl_communicator_config_path=path)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nccl_communicator_config_path=no/file\.yaml"):
        MegatronStrategy(nccl_communicator_config_path="no/file.yaml")


def test_groups_of_the_same_ranks_cannot_differ() -> None:
    """Without context parallelism dp and dp-cp are one communicator."""
    few, many = NcclOptions(max_ctas=4), NcclOptions(max_ctas=8)
    ranks = {"dp": (0, 2), "dp-cp": (0, 2), "tp": (0, 1), "ep": (0, 2)}
    shared = {name: communicator_key(name, of_group) for name, of_group in ranks.items()}
    with pytest.raises(
        ConfigError, match=r"dp and dp-cp differ, and both are the 2 ranks \(0, 2\)"
    ):
        options_of_communicators({"dp": few, "dp-cp": many}, shared)
    same = options_of_communicators({"dp": few, "dp-cp": few, "tp": many, "ep": many}, shared)
    assert same == {shared["dp"]: few, shared["tp"]: many, shared["ep"]: many}


def _communicators() -> Any:
    layout, options = ParallelLayout(tensor_model_parallel_size=2), NcclOptions(max_ctas=8)
    context = ParallelContext(layout, nccl_options={"tp": options})
    shares_world = context.tp.process_group is dist.group.WORLD
    context.device = torch.device("cuda")
    group = context.tp.process_group
    with (
        patch.object(NcclOptions, "for_torch", lambda own: own),
        patch.object(dist, "new_group", return_value=group) as new,
    ):
        context.new_process_group((0, 1), "tp")
    return shares_world, new.call_args.kwargs["pg_options"] == options


def test_options_go_to_communicators_of_the_group() -> None:
    """The default process group exists before the options, so a group of all ranks is another."""
    assert run_ranks(2, _communicators) == [(False, True)] * 2


@pytest.mark.parametrize(
    ("sizes", "data_parallel", "value", "capability", "warns"),
    [
        ({"tensor_model_parallel_size": 2}, "zero1", None, HOPPER, True),
        ({"context_parallel_size": 2}, "ddp", "8", HOPPER, True),
        ({"tensor_model_parallel_size": 2}, "zero1", "1", HOPPER, False),
        ({"tensor_model_parallel_size": 2}, "zero1", None, BLACKWELL, False),
        ({"tensor_model_parallel_size": 2}, "fsdp", None, HOPPER, False),
        ({}, "zero1", None, HOPPER, False),
        ({"tensor_model_parallel_size": 2}, "zero1", None, None, False),
    ],
)
def test_tensor_and_context_parallel_ranks_want_one_queue(
    sizes: Any, data_parallel: str, value: str | None, capability: Any, warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with patch("megatron_lightning.parallel.grid.gpu_queues.rank_zero_warn") as warn:
        check_connections(ParallelLayout(**sizes), data_parallel, capability)
    assert warn.called == warns
    if warns:
        assert f"Set {VARIABLE}=1" in warn.call_args.args[0]


def test_fsdp_refuses_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    check_connections(ParallelLayout(), "fsdp", None)
    with pytest.raises(ConfigError, match=rf"{VARIABLE} is 1 and data_parallel is \"fsdp\""):
        check_connections(ParallelLayout(), "fsdp", HOPPER)


def _exchange() -> str:
    gpu = torch.device("cuda", 0)
    check_exchange(ParallelLayout(), gpu)
    check_exchange(ParallelLayout(tensor_model_parallel_size=2), torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        check_exchange(ParallelLayout(pipeline_model_parallel_size=2), gpu)
    return str(caught.value)


def test_gloo_sends_no_activations_of_gpus() -> None:
    for message in run_ranks(2, _exchange):
        assert "(pipeline 2): gloo sends nothing from the memory of a GPU" in message
        assert "Leave process_group_backend unset" in message
