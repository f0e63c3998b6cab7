"""Compiled blocks on batches of five lengths: one graph for the first, one with symbols for all
others, and the losses of uncompiled blocks (fp32, 1e-6 relative).
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import CompileOptions
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.language_model import VOCABULARY, small_gpt
from tests.helpers.layouts import fit
from tests.parity.test_compiled import _Graphs

LENGTHS = (8, 16, 12, 14, 6)


def _batches(*, documents: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in LENGTHS:
        text = torch.randint(0, VOCABULARY, (2, length + 1), generator=generator)
        batches.append({"tokens": text[:, :-1], "labels": text[:, 1:]})
        if documents:
            ends = torch.tensor([[length // 3], [length // 2]])
            batches[-1]["document_ids"] = (torch.arange(length) >= ends).long()
    return batches


def _train(model: dict[str, Any], *, documents: bool, compiled: bool) -> Any:
    pl.seed_everything(3, verbose=False)
    graphs = _Graphs()
    options: Any = {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
    module = GPTLightningModule(small_gpt(3, **model), learning_rate=1e-3)
    loader: Any = DataLoader(_batches(documents=documents), batch_size=None)  # type: ignore[arg-type]
    layout = options if compiled else {}
    run = fit(layout, module, loader, steps=len(LENGTHS), callbacks=[graphs])
    return run.losses, graphs.count, graphs.breaks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "documents"),
    [
        pytest.param({"window_size": (3, 0)}, True, id="window, documents"),
        pytest.param({}, False, id="plain", marks=pytest.mark.slow),
        pytest.param(
            {"window_size": (3, 0), "window_attn_skip_freq": 2},
            False,
            id="window",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"softmax_type": "learnable", "attn_logit_softcapping": 1.0, "init_method_std": 0.4},
            True,
            id="caps, sinks, documents",
            marks=pytest.mark.slow,
        ),
        pytest.param({"attention_backend": "math"}, False, id="math", marks=pytest.mark.slow),
    ],
)
def test_sizes_become_symbols_with_the_second_length(
    model: dict[str, Any], documents: bool
) -> None:
    expected = _train(model, documents=documents, compiled=False)[0]
    losses, num_graphs, breaks = _train(model, documents=documents, compiled=True)
    assert losses == pytest.approx(expected, rel=1e-6)
    num_forms = 2 if "window_attn_skip_freq" in model else 1  # of layers
    assert num_graphs == 2 * num_forms and not breaks
