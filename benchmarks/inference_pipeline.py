"""Text on two pipeline stages: two groups of requests that follow one another through the stages,
beside one group that waits for each step's end.
"""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.ranks import run
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.parallel import ParallelLayout

Seconds = tuple[float, float]
"""Wall and processor seconds."""


def measure(folder: Path, vocabulary: int, rounds: int) -> list[dict[str, list[Seconds]]]:
    """Return the seconds of 16 texts of 24 tokens, by one group and rolling, of each rank."""
    return run(2, _write, folder, vocabulary, rounds, limit_s=1800.0)


def _write(folder: Path, vocabulary: int, rounds: int) -> dict[str, list[Seconds]]:
    layout = ParallelLayout(pipeline_model_parallel_size=2)
    engine = Engine.load(folder, layout, options=EngineOptions(max_tokens=4096), stops=())
    draws = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, vocabulary, (16, 32), generator=draws).tolist()
    sampling = Sampling(max_new_tokens=24, temperature=0.0)
    seconds: dict[str, list[Seconds]] = {"one group": [], "rolling": []}
    texts = {}
    for _ in range(rounds + 1):
        for name, own in seconds.items():
            # Replicas that step together have one group: an engine of one group.
            with patch.object(Engine, "steps_together", new=name == "one group"):
                dist.barrier()
                wall, busy = time.perf_counter(), time.process_time()
                texts[name] = engine.generate(prompts, sampling)
                dist.barrier()
                own.append((time.perf_counter() - wall, time.process_time() - busy))
    if texts["one group"] != texts["rolling"]:
        raise RuntimeError("the groups give other texts; the times mean nothing.")
    return {name: own[1:] for name, own in seconds.items()}
