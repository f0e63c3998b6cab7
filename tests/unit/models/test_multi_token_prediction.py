"""Multi-token prediction on one process: values and gradients of a reference written from the
paper, shifts over documents and over parts of sequences, and what does not predict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.assembly.partition import check_partition
from megatron_lightning.config import MoEConfig, PipelineOptions
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.mtp import IGNORED, TokenShift
from megatron_lightning.layers.styles import ContextGroup
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.parallel.deal import Deal
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.sequence import SequencePart, join
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.stage_layouts import split_units
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

VOCABULARY, SEQUENCE, DEPTHS = 30, 12, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "mtp_num_layers": DEPTHS,
    "mtp_loss_scaling_factor": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "learned": {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 1e-2},
    "experts": {"moe": MoEConfig(num_experts=4, router_load_balancing_type="none")},
}


def _batch(masked: bool = True) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCABULARY, (3, SEQUENCE + 1), generator=torch.manual_seed(3))
    labels = text[:, 1:].clone()
    if masked:
        labels[0, 2:5] = labels[2, -1] = IGNORED
    return text[:, :-1], labels


def _reference(model: GPTModel, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    """Equations 21 to 25 of the paper, position by position of the labels: the main losses of the
    tokens, and the mean loss of every depth. Depth k sees only the s - k positions that have a
    token k further on."""
    config, s = model.config, tokens.shape[1]

    def embed(ids: Tensor, first: int) -> Tensor:
        vectors = F.embedding(ids, model.embedding.word_embeddings.weight)
        if model.embedding.position_embeddings is not None:
            vectors = vectors + model.embedding.position_embeddings.weight[first:][: ids.shape[1]]
        return vectors.transpose(0, 1)

    def losses(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden.transpose(0, 1), model.output_layer.weight).transpose(1, 2)
        found = F.cross_entropy(
            logits, targets, reduction="none", label_smoothing=config.label_smoothing
        )
        squares = logits.logsumexp(1).square() * (targets != IGNORED)
        return found + config.z_loss * squares

    hidden = embed(tokens, 0)
    for layer in model.decoder.layers.values():
        hidden = layer(hidden, SequenceInfo())
    hidden = model.decoder.final_layernorm(hidden)
    found = [losses(hidden, labels)]
    assert model.mtp is not None
    for k, depth in enumerate(model.mtp.layers.values(), 1):
        hidden = hidden[: s - k]
        pair = [depth.enorm(embed(tokens[:, k:], k)), depth.hnorm(hidden)]
        hidden = F.linear(torch.cat(pair, -1), depth.eh_proj.weight)
        hidden = depth.final_layernorm(depth.transformer_layer(hidden, SequenceInfo()))
        later = labels[:, k:]
        found.append(losses(hidden, later).sum() / (later != IGNORED).sum())
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_equal_the_paper(kind: str) -> None:
    model = GPTModel(tiny_config(**SIZES, **MODELS[kind]))
    tokens, labels = _batch()
    main, *depths = _reference(model, tokens, labels)
    weight = torch.rand(main.shape, generator=torch.manual_seed(5))
    scale = 0.3 / DEPTHS
    ((main * weight).sum() + scale * sum(depths)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in expected.values())
    model.zero_grad()
    losses = model(tokens, labels=labels)
    (losses * weight).sum().backward()
    # fp32; sums of other tokens, which are masked, come between.
    torch.testing.assert_close(losses, main, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        # Of a gradient's largest element: small ones are differences of large terms.
        atol = 1e-6 * float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=atol, msg=name)
    reports = {key.name: float(v[0][0]) for key, v in model.mtp.loss.report.take().items()}  # type: ignore[union-attr]
    named = {f"mtp_{k}_loss": mean.item() for k, mean in enumerate(depths, 1)}
    assert reports == pytest.approx({**named, "mtp_loss": scale * sum(named.values())}, rel=1e-5)


def test_without_labels_they_follow_from_the_tokens() -> None:
    """A step that computes its own loss from logits."""
    model = GPTModel(tiny_config(**SIZES))
    tokens, _ = _batch()
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    model(tokens, labels=labels).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(tokens)
    assert logits.shape == (3, SEQUENCE, VOCABULARY)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_evaluation_is_that_of_the_model_without() -> None:
    config = tiny_config(**SIZES)
    model, plain = GPTModel(config), GPTModel(replace(config, mtp_num_layers=None))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("mtp")})
    tokens, labels = _batch()
    model.eval()
    for layer in model.mtp.layers.values():  # type: ignore[union-attr]
        layer.transformer_layer.forward = None  # is not called
    assert torch.equal(model(tokens), plain.eval()(tokens))
    assert torch.equal(model(tokens, labels=labels), plain(tokens, labels=labels))
    assert not model.mtp.loss.report.take()  # type: ignore[union-attr]


def test_documents_are_not_looked_beyond() -> None:
    """Rows of two documents each give the losses of the documents alone."""
    model = GPTModel(tiny_config(**SIZES))
    tokens, labels = _batch(masked=False)
    lengths = (5, 7)
    ids = torch.tensor([[0] * 5 + [1] * 7] * 3)
    alone = []
    for part, marked in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True):
        losses = model(part, labels=marked)
        alone.append((losses, model.mtp.loss.report.take()))  # type: ignore[union-attr]
    packed = model(tokens, labels=labels, document_ids=ids)
    torch.testing.assert_close(packed, torch.cat([losses for losses, _ in alone], 1))
    together = {k.name: float(v[0][0]) for k, v in model.mtp.loss.report.take().items()}  # type: ignore[union-attr]
    for depth in range(1, DEPTHS + 1):
        name, total = f"mtp_{depth}_loss", 0.0
        for (_, reports), length in zip(alone, lengths, strict=True):
            found = {key.name: float(v[0][0]) for key, v in reports.items()}
            total += found[name] * (length - depth)
        assert together[name] == pytest.approx(total / (SEQUENCE - 2 * depth), rel=1e-5)


def test_all_labels_may_be_masked() -> None:
    model = GPTModel(tiny_config(**SIZES))
    tokens, labels = _batch()
    model(tokens, labels=torch.full_like(labels, IGNORED)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ------------------------------------------------------------------------------------------ shifts


DOCUMENTS = ((0, 8), (0, 3, 8), (0, 1, 4, 5, 8))
DEALS = {2: Deal((1, 0, 0, 1, 1, 1, 0, 0)), 4: Deal((2, 0, 3, 3, 1, 0, 1, 2))}


def _shifted(num_ranks: int) -> list[Tensor]:
    context = ParallelContext(ParallelLayout(context_parallel_size=num_ranks))
    shift = TokenShift()
    ContextGroup().apply(shift, context, None)  # type: ignore[arg-type]
    rows = torch.arange(3 * 8).view(3, 8) + 1
    found = []
    for documents in (None, Documents(DOCUMENTS), Documents(DOCUMENTS, DEALS.get(num_ranks))):
        deal = None if documents is None else documents.deal
        x = SequencePart(context.cp.rank, num_ranks, deal).split(rows, 1)
        for _ in range(3):
            x = shift(x, IGNORED, documents)
            found.append(x)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_sequences_are_shifted_as_one(num_ranks: int) -> None:
    """Four ranks have chunks of one position."""
    full, parts = _shifted(1), run_ranks(num_ranks, _shifted, num_ranks)
    for index, expected in enumerate(full):
        deal = DEALS[num_ranks] if index >= 6 else None
        assert torch.equal(join([rank[index] for rank in parts], 1, deal), expected)
    rows = torch.arange(3 * 8).view(3, 8) + 1
    assert torch.equal(full[1], F.pad(rows[:, 2:], (0, 2), value=IGNORED))
    two = [[3, 4, 5, 6, 7, 8, -100, -100], [11, -100, -100, 14, 15, 16, -100, -100]]
    assert full[4][:2].tolist() == two
    assert full[4][2].tolist() == [-100, 20, -100, -100, -100, 24, -100, -100]


def test_a_group_is_for_modules_that_have_one() -> None:
    group = AxisGroup("cp", (0,), 0, None)
    assert TokenShift().context_group.size == group.size
    with pytest.raises(ShardingError, match="a Linear, which has none"):
        ContextGroup().apply(torch.nn.Linear(1, 1), None, None)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mtp_num_layers": 0}, "mtp_num_layers is 0; it must be a positive integer"),
        ({"mtp_loss_scaling_factor": -0.1}, "mtp_loss_scaling_factor is -0.1; it cannot be below"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**{**SIZES, **options})


def test_layouts_are_checked_before_the_model_is_built() -> None:
    module = GPTLightningModule(tiny_config(**SIZES))
    placement = Placement.loop(3)

    def check(layout: str) -> None:
        options = PipelineOptions(pipeline_model_parallel_layout=layout)
        check_partition(module, placement, options, is_built=False)

    check("Ett|mm|L")
    with pytest.raises(ConfigError, match=r"1 layers m \(mtp\), and pipeline_units\(\) lists 2"):
        check("Ett|m|L")
    with pytest.raises(ConfigError, match="Write all m in one stage, behind the last t"):
        check("Ett|m|mL")


def test_all_depths_are_on_one_stage() -> None:
    config = tiny_config(**{**SIZES, "num_layers": 5, "mtp_num_layers": 3})
    with torch.device("meta"):
        units = GPTModel(config).pipeline_units()
    stages = split_units(units, Placement.loop(2), PipelineOptions())
    assert [sum("layers" in unit for unit in stage) for stage in stages] == [4, 4]
    stages = split_units(units, Placement.loop(6), PipelineOptions())
    assert stages[-1] == (*(f"mtp.layers.{i}" for i in range(3)), "output_layer", "mtp.loss")
    counted = PipelineOptions(account_for_loss_in_pipeline_split=True)
    stages = split_units(units, Placement.loop(2), counted)
    assert stages[1][-3:] == ("mtp.layers.2", "output_layer", "mtp.loss")
