"""Models of Mamba-2 layers train on every layout as ``transformers`` trains them on one process,
with documents in the rows, and resume in another layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import ContextOptions, MambaConfig, RecomputeOptions
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.state_space.mamba import MambaMixer
from megatron_lightning.layers.styles import GroupedHeads
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import ShardingPlan
from tests.helpers.layouts import LAYOUTS as NAMED
from tests.helpers.layouts import Fit, Layout, fit, make_layout, tiny_config
from tests.helpers.ranks import run_ranks

transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, VOCABULARY = 2, 4, 24, 50
HIDDEN, HEADS, HEAD_DIM, STATE, LAYERS = 32, 8, 8, 12, 4
ENDS = ((), (5,), (13, 14), (4, 8, 12, 18))
"""Ends of the inner documents of the rows: in the middle of chunks and segments, and at their
ends."""
TRAIN: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
RTOL = 1e-5  # fp32, sums in another order
FULL = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
DEALT = ContextOptions(chunks_per_rank=4)
LAYOUTS: dict[str, Layout] = {
    "tp2, sp": NAMED["tp2"],
    "pp2": NAMED["pp2"],
    "cp2": NAMED["cp2"],
    "fsdp2": NAMED["fsdp2"],
    "zero1": NAMED["dp2-zero1"],
    "tp2 x pp2": NAMED["tp2-pp2"],
    "tp2 x cp2": NAMED["tp2-cp2"],
    "pp2 x vpp2": NAMED["pp2-vpp2"],
    "cp3": make_layout("cp3", 3, cp=3),
    "tp4": make_layout("tp4", 4, tp=4),
    "tp2 without sp": make_layout("tp2-without-sp", 2, tp=2, sp=False),
    "zb-h1": make_layout("zb-h1", 2, pp=2, mbs=2, pipeline_schedule="zb-h1"),
    "cp2, dealt": make_layout("cp2-dealt", 2, cp=2, context_options=DEALT),
    "cp2, recomputed": make_layout("cp2-recomputed", 2, cp=2, recompute=FULL),
}
USUAL = (("tp2, sp", 1), ("cp2, dealt", 2))
CASES = [(layout, groups) for layout in LAYOUTS for groups in (1, 2)]


def _rows(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for row, ends in enumerate(ENDS):
        for end in ends:
            ids[row, end:] += 1
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "document_ids": ids}


def _theirs(groups: int) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.Mamba2Config(
        hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, n_groups=groups, state_size=STATE,
        expand=2, chunk_size=8, num_hidden_layers=LAYERS, vocab_size=VOCABULARY,
        layer_norm_epsilon=1e-5, use_bias=False, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = transformers.Mamba2ForCausalLM(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@cache
def _trained_by_transformers(groups: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Return first weights, losses and gradient norms of plain steps, document by document."""
    model = _theirs(groups)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), **TRAIN)
    losses, norms = [], []
    for step in range(STEPS):
        rows, total = _rows(step), torch.zeros(())
        for row, ends in enumerate(ENDS):
            for start, stop in pairwise((0, *ends, LENGTH)):
                logits = model(rows["tokens"][row : row + 1, start:stop], use_cache=False).logits[0]
                labels = rows["labels"][row, start:stop]
                total = total + F.cross_entropy(logits, labels, reduction="sum")
        loss = total / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return weights, losses, norms


def _as_ours(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "backbone.embeddings": "embedding.word_embeddings",
        "backbone.layers": "decoder.layers",
        "backbone.norm_f": "decoder.final_layernorm",
        "lm_head": "output_layer",
    }
    ours = {}
    for name, tensor in weights.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        ours[names[prefix] + name.removeprefix(prefix)] = tensor
    return ours


class _Module(pl.LightningModule):
    """The model with their weights, their loss and their optimizer."""

    sequence_dims = {"tokens": 1, "labels": 1, "document_ids": 1}  # noqa: RUF012

    def __init__(self, groups: int, weights: dict[str, Tensor] | None) -> None:
        super().__init__()
        mamba = MambaConfig(head_dim=HEAD_DIM, num_groups=groups, state_dim=STATE, chunk_size=8)
        self.config = tiny_config(
            layer_pattern="M" * LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY,
            max_sequence_length=LENGTH, mamba=mamba,
        )  # fmt: skip
        self.weights = weights
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config)
            if self.weights is not None:
                self.model.load_state_dict(_as_ours(self.weights))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        inputs = {"document_ids": batch["document_ids"]}
        return self.model(batch["tokens"], labels=batch["labels"], **inputs).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **TRAIN)


def _samples() -> Any:
    return [
        {name: tensor[row] for name, tensor in _rows(step).items()}
        for step in range(STEPS)
        for row in range(BATCH)
    ]


def _train(
    groups: int,
    weights: dict[str, Tensor] | None,
    layout: Layout,
    checkpoint: str | None = None,
    **options: Any,
) -> Fit:
    loader = DataLoader(_samples(), batch_size=BATCH // layout.data)
    options = {"steps": STEPS, "gradient_clip_val": 1.0, "ckpt_path": checkpoint} | options
    return fit(layout, _Module(groups, weights), loader, **options)


def _run(groups: int, weights: dict[str, Tensor], layout: Layout) -> list[list[float]]:
    run = _train(groups, weights, layout)
    return [run.losses, run.norms]


def _mark(case: tuple[str, int]) -> Any:
    return pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "groups"), [_mark(case) for case in CASES])
def test_a_layout_trains_as_transformers_do(name: str, groups: int) -> None:
    """One group is shared by tensor-parallel ranks; nothing is divided by context parallelism."""
    weights, expected, norms = _trained_by_transformers(groups)
    layout = LAYOUTS[name]
    results = run_ranks(layout.ranks, _run, groups, weights, layout, timeout_s=300.0)
    losses = [sum(step) / len(results) for step in zip(*(own for own, _ in results), strict=True)]
    assert losses == pytest.approx(expected, rel=RTOL)
    assert results[0][1] == pytest.approx(norms, rel=RTOL)


def _resume(groups: int, weights: dict[str, Tensor], folder: str) -> list[list[list[float]]]:
    """Save after a step under tensor parallelism, and resume with context parallelism and fsdp."""
    path = f"{folder}/first"
    first = _train(groups, weights, LAYOUTS["tp2, sp"], steps=1)
    first.trainer.save_checkpoint(path)
    resumed = [_train(groups, None, LAYOUTS[name], path) for name in ("cp2", "fsdp2")]
    return [[run.losses, run.norms] for run in (first, *resumed)]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_training_resumes_in_another_layout(groups: int, tmp_path: Path) -> None:
    weights, losses, norms = _trained_by_transformers(groups)
    ranks = run_ranks(2, _resume, groups, weights, str(tmp_path), timeout_s=120.0)
    for index, steps in ((0, slice(1)), (1, slice(1, 2)), (2, slice(1, 2))):
        runs = [own[index] for own in ranks]
        means = [sum(step) / 2 for step in zip(*(own for own, _ in runs), strict=True)]
        assert means == pytest.approx(losses[steps], rel=RTOL)
        assert runs[0][1] == pytest.approx(norms[steps], rel=RTOL)


def _dtypes(groups: int, layout: Layout) -> tuple[list[float], dict[str, set[str]]]:
    seen: set[str] = set()
    original = MambaMixer.forward

    def forward(self: MambaMixer, *args: Any) -> Tensor:
        seen.add(f"{self.A_log.dtype} {self.in_proj.weight.dtype}")
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer, "forward", forward)
        run = _train(groups, None, layout, precision="bf16-true")
    assert seen == {"torch.float32 torch.bfloat16"}
    found: dict[str, set[str]] = {}
    for name, parameter in run.module.named_parameters():
        found.setdefault(name.rpartition(".")[2], set()).add(str(parameter.dtype))
    return run.losses, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2, sp", "cp2", "fsdp2", "zero1"])
def test_decays_stay_in_fp32_in_a_bf16_model(name: str) -> None:
    ((expected, _),) = run_ranks(1, _dtypes, 2, NAMED["one"])
    results = run_ranks(2, _dtypes, 2, LAYOUTS[name])
    for _, dtypes in results:
        assert dtypes["A_log"] == dtypes["D"] == dtypes["dt_bias"] == {"torch.float32"}
        # Shards of fsdp are main params in fp32, and are gathered in bf16.
        assert (dtypes["weight"] == {"torch.bfloat16"}) is (name != "fsdp2")
    losses = [sum(step) / 2 for step in zip(*(own for own, _ in results), strict=True)]
    assert losses == pytest.approx(expected, rel=2e-3)  # bf16 has 8 bits


def test_groups_that_ranks_cannot_share_are_refused() -> None:
    layout, plan = ParallelLayout(tensor_model_parallel_size=2), ShardingPlan(modules={})
    for heads, groups in ((8, 3), (9, 1)):
        with pytest.raises(ShardingError, match=f"{heads} heads in {groups} groups cannot"):
            GroupedHeads((), heads, groups).check(nn.Identity(), layout, plan)
