"""An elastic job of torchrun: a second agent joins, and training goes on with more replicas and the
same global batch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.cluster_job import rescue, write_recipe
from tests.faults.forty import values
from tests.faults.processes import ROOT
from tests.helpers.slurm import free_port
from tests.helpers.slurm_cluster import wait_until

STEPS = 16
LIMIT_S = 300.0


@contextmanager
def _agent(recipe: Path, port: str, nodes: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent of torchrun with one rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1",
        "--max-restarts=3", "--monitor-interval=0.5", "--local-addr=127.0.0.1", "--rdzv-id=job",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-conf=join_timeout=120,last_call_timeout=3",
        "-m", "megatron_lightning", "fit", "--config", str(recipe), "--ckpt_path", "last",
        "--trainer.default_root_dir", str(recipe.parent),
    ]  # fmt: skip
    # torch publishes the address of a shared store in the first round alone.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (recipe.parent / "output").open("ab") as output:
        agent = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield agent
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _recipe(folder: Path, pause_s: float) -> Path:
    folder.mkdir()
    return write_recipe(
        folder, num_nodes=1, devices="auto", strategy={}, steps=STEPS, pause_s=pause_s,
        hidden_dropout=0.0,
        callbacks=(rescue(folder), {"class_path": "tests.faults.cluster_job.Rows"}),
    )  # fmt: skip


def _rows(output: str) -> dict[int, list[str]]:
    """Return the rows of every step over all ranks, in any order."""
    found: dict[int, list[str]] = {}
    for step, rows in re.findall(r"ROWS \d (\d+) (\S+)", output):
        found.setdefault(int(step), []).extend(rows.split(","))
    return {step: sorted(rows) for step, rows in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_agent_joins_with_the_global_batch_kept(tmp_path: Path) -> None:
    alone = _recipe(tmp_path / "alone", 0.0)
    with _agent(alone, free_port(), "1") as agent:
        assert agent.wait(LIMIT_S) == 0
    expected = (alone.parent / "output").read_text(errors="replace")
    port, recipe = free_port(), _recipe(tmp_path / "elastic", 1.0)

    def output() -> str:
        return (recipe.parent / "output").read_text(errors="replace")

    with _agent(recipe, port, "1:2") as first:
        wait_until(lambda: "LOSS 0 3 " in output(), "training", LIMIT_S)
        with _agent(recipe, port, "1:2") as second:
            assert first.wait(LIMIT_S) == 0, output()
            assert second.wait(60) == 0, output()
    grown = {int(step) for step in re.findall(r"ROWS 2 (\d+) ", output())}
    assert grown and max(grown) == STEPS - 1 and min(grown) >= 3, output()
    # Every sample once: a step that the agent interrupted was saved.
    assert _rows(output()) == _rows(expected), output()
    losses = values(output())
    for step in range(1, STEPS + 1):
        [[whole]] = [values(expected)["LOSS", 0, step]]
        own = [float(v) for rank in (0, 1) for v in losses.get(("LOSS", rank, step), ())]
        # fp32, averaged over two replicas, after steps of Adam
        assert sum(own) / len(own) == pytest.approx(float(whole), rel=1e-5), output()
