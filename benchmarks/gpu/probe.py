"""Whether two ranks may share a GPU over NCCL, in half a minute.

NCCL gives a communicator two ranks on one GPU from 2.30 on. A sandbox may lack what its messages
use, so each collective is tried before tests rely on them: once as NCCL chooses, then without P2P
and cuMem. Ranks that share a GPU take turns: no speed is reported from them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.gpu.worker import end_with_parent

CHOICE = "TWO_RANKS_A_GPU"
"""Variable that the tests of several ranks read: ``nccl``, or ``gloo``."""
LIMIT_S, FIRST_S = 30.0, 18.0
"""Of all settings, and of the first."""
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "8"}
SETTINGS: tuple[Mapping[str, str], ...] = (
    SHARED,
    {**SHARED, "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"},
)
WORKS = ("all_reduce", "send and receive", "all_to_all")


class Found(NamedTuple):
    """The setting that works, for the tests."""

    env: Mapping[str, str]
    said: Mapping[str, Any]
    """For the record: of each setting, the collectives that worked, and what stopped it."""


def two_ranks_a_device(env: Mapping[str, str], backend: str = "nccl") -> Found:
    """Return the first setting under which two ranks on one device exchange tensors.

    Args:
        env: Added to the environment, such as a newer NCCL in ``LD_PRELOAD``.
        backend: Of the ranks.
    """
    begin, said = time.monotonic(), {}
    for number, setting in enumerate(SETTINGS):
        limit_s = FIRST_S if number == 0 else LIMIT_S - (time.monotonic() - begin)
        works, stopped = _try({**env, **setting}, backend, limit_s)
        changed = " ".join(f"{k}={v}" for k, v in setting.items() if k not in SHARED)
        said[changed or "as NCCL chooses"] = {"works": works, **stopped}
        if not stopped:
            return Found({**setting, CHOICE: "nccl"}, said)
    return Found({CHOICE: "gloo"}, said)


def _try(env: Mapping[str, str], backend: str, limit_s: float) -> tuple[list[str], dict[str, str]]:
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank-{rank}" for rank in range(2)]
        ranks = []
        for rank, path in enumerate(files):
            command = [sys.executable, "-m", "benchmarks.gpu.probe", str(rank), folder, backend]
            with path.open("w") as out:
                ranks.append(
                    subprocess.Popen(
                        command, cwd=machine.ROOT, env={**os.environ, **env}, stdout=out,
                        stderr=out, start_new_session=True,
                    )
                )  # fmt: skip
        try:
            codes = [rank.poll() for rank in ranks]
            # A rank whose peer has failed would wait.
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.05)
                codes = [rank.poll() for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [path.read_text() for path in files]
    works = [work for work in WORKS if all(f"{work}: works" in text for text in texts)]
    if works == [*WORKS]:
        return works, {}
    said = [line for t, code in zip(texts, codes, strict=True) if code for line in t.splitlines()]
    if not any(codes):
        return works, {"stopped by": f"no result within {limit_s:.0f} s"}
    return works, {"stopped by": said[-1] if said else f"exit codes {codes}"}


def exchange(device: torch.device) -> list[str]:
    """Exchange tensors as one of two ranks; print and return the collectives that work.

    Raises:
        ValueError: If one gives wrong values.
    """
    rank, works = dist.get_rank(), []
    mine, other = (torch.full((2, 4096), float(r), device=device) for r in (rank, 1 - rank))
    for work in WORKS:
        got = torch.empty_like(mine)
        expected = other
        if work == "all_reduce":
            got.copy_(mine)
            dist.all_reduce(got)
            expected = mine + other
        elif work == "all_to_all":
            dist.all_to_all_single(got, mine)
            expected = torch.tensor([[0.0], [1.0]], device=device).expand(2, 4096)
        else:
            peer = 1 - rank
            sent = dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)
            for request in dist.batch_isend_irecv(list(sent)):
                request.wait()
        if not torch.equal(got, expected):
            raise ValueError(f"{work} gives wrong values")
        works.append(work)
        print(f"{work}: works", flush=True)
    return works


def main(rank: int, folder: str, backend: str) -> None:
    """Be one of two ranks."""
    end_with_parent()
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    exchange(torch.device("cuda:0" if backend == "nccl" else "cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
