"""Every layout trains as one device does: losses and gradient norms of three optimizer steps
against plain Lightning, in fp32.

1e-5 relative: fp32 sums over ranks and micro-batches are taken in another order, and AdamW steps
amplify that, since a weight whose gradient is close to rounding moves as far as any other. At this
learning rate the differences are about 1e-6.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import PipelineOptions, RecomputeOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses

STEPS, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 3, 8, 16, 50
LEARNING_RATE = 1e-3
RTOL = 1e-5


def _config(**changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "num_query_groups": 4,
    }
    sizes |= {
        "ffn_hidden_size": 48,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
    }
    return tiny_config(**{**sizes, **changes})


def _samples(steps: int = STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (steps * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    mask = (torch.rand(steps * GLOBAL_BATCH, SEQUENCE, generator=generator) < 0.8).float()
    return [
        {"tokens": t[:-1], "labels": t[1:], "loss_mask": m} for t, m in zip(text, mask, strict=True)
    ]


class _WeighedLosses(Losses):
    """Remembers also how many items (tokens that count) the loss of this rank is the mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[float] = []

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, module, outputs)
        self.items.append(float(batch["loss_mask"].sum()))


def _train(
    config: dict[str, Any], options: dict[str, Any] | None, num_replicas: int
) -> list[list[float]]:
    """Return this rank's loss, the number of items it is the mean of, and the gradient norm, of
    every optimizer step."""
    module = GPTLightningModule(_config(**config), learning_rate=LEARNING_RATE)
    record = _WeighedLosses()
    loader = DataLoader(_samples(), batch_size=GLOBAL_BATCH // num_replicas)
    fit(options, module, loader, steps=STEPS, record=record, gradient_clip_val=1.0)
    return [record.losses, record.items, record.norms]


@cache
def _one_device(config: tuple[tuple[str, Any], ...]) -> list[list[float]]:
    return run_ranks(1, _train, dict(config), None, 1)[0]


def _check(world: int, config: dict[str, Any], options: dict[str, Any]) -> None:
    layout_size = options.get("tensor_model_parallel_size", 1) * options.get(
        "pipeline_model_parallel_size", 1
    )
    expected_losses, _, expected_norms = _one_device(tuple(config.items()))
    losses, items, norms = zip(
        *run_ranks(world, _train, config, options, world // layout_size, timeout_s=100), strict=True
    )
    assert np.average(losses, axis=0, weights=items) == pytest.approx(expected_losses, rel=RTOL)
    for rank_norms in norms:
        assert rank_norms == pytest.approx(expected_norms, rel=RTOL)


def _layouts() -> list[Any]:
    """The grid up to 8 ranks: tensor x pipeline x data x sequence parallel x optimizer sharding x
    micro-batches."""
    grid = [
        (tp, pp, dp, sp, mode, micro)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for dp in (1, 2, 4)
        for sp in (False, True)
        for mode in ("ddp", "zero1", "fsdp")
        for micro in (1, 2, 4, 8)
        if tp * pp * dp <= 8
        and (tp > 1 or not sp)
        and (dp > 1 or mode == "ddp")
        and micro <= GLOBAL_BATCH // dp
    ]
    spread = {
        (1, 1, 1, False, "ddp", 4), (1, 1, 2, False, "zero1", 2), (1, 2, 1, False, "ddp", 4),
        (2, 1, 1, True, "ddp", 1),
        (2, 1, 1, False, "ddp", 2), (2, 2, 2, True, "zero1", 2), (1, 4, 2, False, "zero1", 4),
        (4, 1, 2, True, "ddp", 2),
    }  # fmt: skip
    names = [f"tp{t}-pp{p}-dp{d}{'-sp' if s else ''}-{mode}-{m}mb" for t, p, d, s, mode, m in grid]
    return [
        pytest.param(*case, id=name, marks=() if case in spread else pytest.mark.slow)
        for case, name in zip(grid, names, strict=True)
    ]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("tp", "pp", "dp", "sp", "mode", "micro"), _layouts())
def test_layout_equals_one_device(
    tp: int, pp: int, dp: int, sp: bool, mode: str, micro: int
) -> None:
    options = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": sp,
        "data_parallel": mode,
        "micro_batch_size": GLOBAL_BATCH // dp // micro,
    }
    _check(tp * pp * dp, {}, options)


BIAS = {"normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "data"),
    [
        pytest.param({"share_embeddings_and_output_weights": True}, 2, id="tied"),
        pytest.param(BIAS | {"position_embedding_type": "learned_absolute"}, 1, id="bias-learned"),
        pytest.param(BIAS, 1, id="bias"),
        pytest.param({"position_embedding_type": "learned_absolute"}, 1, id="learned"),
        pytest.param(
            {"num_query_groups": 2, "qk_layernorm": True},
            1,
            id="gqa-qknorm",
        ),
        pytest.param(
            {
                "num_query_groups": 1,
                "qk_layernorm": True,
                "add_qkv_bias": True,
                "attention_output_gate": True,
            },
            1,
            id="mqa-gates-on-two-ranks",
        ),
        pytest.param(
            {"num_query_groups": 2, "qk_layernorm": True, "qk_layernorm_per_head": False},
            1,
            id="gqa-norm-of-all-heads",
        ),
    ],
)
def test_model_variants_equal_one_device(config: dict[str, Any], data: int) -> None:
    options = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 1,
    }
    _check(4 * data, config, options)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("pp", "cut"),
    [
        pytest.param(2, PipelineOptions(pipeline_model_parallel_layout="Et|t*4L"), id="layout"),
        pytest.param(
            4,
            PipelineOptions(pipeline_model_parallel_layout="Ett|ttt||L"),
            id="stages-without-layers",
        ),
        pytest.param(2, PipelineOptions(num_layers_in_last_pipeline_stage=1), id="uneven"),
    ],
)
def test_any_cut_equals_one_device(pp: int, cut: PipelineOptions) -> None:
    tied = {"share_embeddings_and_output_weights": True}
    _check(
        pp,
        tied,
        {"pipeline_model_parallel_size": pp, "micro_batch_size": 2, "pipeline_options": cut},
    )


def _schedules() -> list[Any]:
    """Every schedule with every axis: (schedule, pp, vpp, tp, dp, mode, micro-batches, tied)."""
    grid = [
        (schedule, pp, vpp, tp, dp, mode, micro, tied)
        for schedule, chunks in (
            ("gpipe", (1, 2)),
            ("interleaved", (2, 3)),
            ("zb-h1", (1,)),
            ("zbv", (2,)),
        )
        for vpp in chunks
        for pp in (2, 4)
        for tp in (1, 2)
        for dp in (1, 2)
        for mode in ("ddp", "zero1", "fsdp")
        for micro in (2, 4, 8)
        for tied in (False, True)
        if tp * pp * dp <= 8 and (dp > 1 or mode == "ddp") and micro <= GLOBAL_BATCH // dp
    ]
    spread = {
        ("gpipe", 2, 2, 1, 1, "ddp", 4, True), ("interleaved", 2, 2, 2, 1, "ddp", 8, True),
        ("interleaved", 2, 3, 1, 2, "zero1", 4, False), ("zb-h1", 2, 1, 1, 2, "zero1", 4, True),
        ("zbv", 2, 2, 2, 1, "ddp", 4, True),
    }  # fmt: skip
    assert spread <= set(grid)
    names = [
        f"{s}-pp{p}-vpp{v}-tp{t}-dp{d}-{mode}-{m}mb{'-tied' if tied else ''}"
        for s, p, v, t, d, mode, m, tied in grid
    ]
    return [
        pytest.param(*case, id=name, marks=() if case in spread else pytest.mark.slow)
        for case, name in zip(grid, names, strict=True)
    ]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "tp", "dp", "mode", "micro", "tied"), _schedules()
)
def test_schedule_equals_one_device(
    schedule: str, pp: int, vpp: int, tp: int, dp: int, mode: str, micro: int, tied: bool
) -> None:
    options = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "pipeline_schedule": schedule,
        "data_parallel": mode,
        "micro_batch_size": GLOBAL_BATCH // dp // micro,
    }
    layers = max(5, pp * vpp + 1)  # one more than stages: they are uneven
    _check(
        tp * pp * dp, {"num_layers": layers, "share_embeddings_and_output_weights": tied}, options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="tp2"),
        pytest.param(
            4,
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_schedule": "zbv",
            },
            id="tp2-sp-zbv",
        ),
        pytest.param(
            4, {"pipeline_model_parallel_size": 2, "data_parallel": "fsdp"}, id="pp2-fsdp"
        ),
        pytest.param(
            2,
            {
                "pipeline_model_parallel_size": 2,
                "pipeline_schedule": "zb-h1",
                "recompute": RecomputeOptions(
                    recompute_granularity="selective", recompute_modules=["output_layer"]
                ),
            },
            id="zb-h1-recomputed",
        ),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_large_vocabulary_equals_one_device(
    world: int, options: dict[str, Any], tied: bool
) -> None:
    """More than 8 x hidden_size entries: the losses are computed in chunks, the logits twice."""
    config = {"vocab_size": 331, "share_embeddings_and_output_weights": tied}
    _check(world, config, {"micro_batch_size": 2, **options})
