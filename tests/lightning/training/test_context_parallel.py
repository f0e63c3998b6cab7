"""A LightningModule on ranks that share each sequence: what it needs, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.assembly.cp_comm_types import assign_cp_comm_types
from megatron_lightning.assembly.plans import find_plans
from megatron_lightning.config import (
    ContextOptions,
    DataParallelOptions,
    DeltaNetConfig,
    MambaConfig,
)
from megatron_lightning.errors import ConfigError, MegatronLightningError, ShardingError
from megatron_lightning.layers import CoreAttention
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.step_report import StepReport, log_reports
from megatron_lightning.layers.styles import ContextAttention
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardingPlan
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.resilience.failure import PeerFailure
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.lightning.support import SINGLE, Layout, layouts, make_layout, run, thinned

CP2 = make_layout("cp2", 2, 1, context_parallel_size=2)
CP4 = make_layout("cp4", 4, 1, context_parallel_size=4)
CP2_DP2 = make_layout("cp2-dp2", 4, 2, context_parallel_size=2)
CP2_MICRO = make_layout("cp2-micro", 2, 1, context_parallel_size=2, micro_batch_size=2)
LENGTH, VOCABULARY = 16, 20


class Attention(nn.Module):
    """Attention of a user's own, around our core."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.core = CoreAttention(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).transpose(0, 1).unbind(3 - 1)
        return self.out(self.attend(q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.core(q, k, v).transpose(0, 1)


class Elsewhere(Attention):
    """Has a bound core, and computes without it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) / 2
        return torch.einsum("bnst,tbnd->bsnd", scores.softmax(-1), v).flatten(2)


class Foreign(Attention):
    """Calls torch's attention beside the bound core."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        super().attend(q, k, v)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Takes positions under a keyword of its own."""

    plan: ClassVar[ShardingPlan] = ShardingPlan(
        modules={"layers.*.core": ContextAttention()}, positions="where"
    )

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(attention() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        if where is None:
            where = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.places(where)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def sharding_plan(self) -> ShardingPlan:
        return self.plan


class Module(pl.LightningModule):
    """Knows nothing of ranks but ``sequence_dims``; batches are tuples."""

    sequence_dims: ClassVar[Any] = {0: 1, 1: 1}

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net() if net is None else net
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        self.log("longest", float(batch[0].max()), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), tuple(batch[0].shape)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Masked(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch[1].masked_fill(batch[1] == 3, -100)
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), labels.flatten())


class Undeclared(Module):
    sequence_dims = None


def _loader(length: int = LENGTH, masked: bool = False) -> DataLoader[Any]:
    tokens = torch.randint(
        0, VOCABULARY, (16, length + 1), generator=torch.Generator().manual_seed(1)
    )
    labels = tokens[:, 1:].clone()
    if masked:
        labels[:, ::3] = -100
    return DataLoader(list(zip(tokens[:, :-1], labels, strict=True)), batch_size=4)


def _fit(layout: Layout, folder: str) -> Any:
    module = Module()
    fit = layout.trainer(folder, max_epochs=2)
    fit.fit(module, _loader(), _loader())
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return module.seen, logged, state


@layouts(CP2, slow=[CP4, CP2_MICRO])
def test_a_module_of_ones_own(layout: Layout, tmp_path: Path) -> None:
    """Losses, what callbacks see, logged means and maxima, and weights; fp32: 1e-5."""
    seen, logged, state = run(SINGLE, _fit, tmp_path)[0]
    for rank in run(layout, _fit, tmp_path):
        assert [loss for loss, _ in rank[0]] == pytest.approx([loss for loss, _ in seen], rel=1e-5)
        assert [shape for _, shape in rank[0]] == [shape for _, shape in seen]
        assert rank[1] == pytest.approx(logged, rel=1e-5)
        for name, weight in state.items():
            assert rank[2][name] == pytest.approx(weight, rel=1e-4, abs=1e-6), name


class Routed(Net):
    """Experts of single layers, of which a rank may use none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in self.layers
        )

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        where = torch.arange(tokens.shape[1])[None] if where is None else where
        x = self.embed(tokens) + self.places(where)
        for layer, experts in zip(self.layers, self.experts, strict=True):
            x = x + layer(x)
            for number, expert in enumerate(experts):
                chosen = (where < LENGTH // 4) == bool(number)  # a rank of two has none of these
                if chosen.any():
                    x = x + expert(x) * chosen[..., None]
        return self.head(x)


def _fit_routed(layout: Layout, folder: str) -> Any:
    module = Module(Routed())
    layout.trainer(folder, max_epochs=2).fit(module, _loader())
    return [loss for loss, _ in module.seen]


CP2_SMALL_BUCKETS = make_layout(
    "cp2-small-buckets",
    2,
    1,
    context_parallel_size=2,
    context_options=ContextOptions(cp_comm_type="all_gather"),
    data_parallel_options=DataParallelOptions(bucket_size=256),
)


@layouts(CP2_SMALL_BUCKETS)
def test_experts_without_a_token_on_a_rank(layout: Layout, tmp_path: Path) -> None:
    """Their bucket is reduced later than on the other rank, between other exchanges of layers."""
    losses = run(SINGLE, _fit_routed, tmp_path)[0]
    for rank in run(layout, _fit_routed, tmp_path):
        assert rank == pytest.approx(losses, rel=1e-5)


class Unbound(Net):
    def sharding_plan(self) -> ShardingPlan:
        return ShardingPlan(modules={})


class Beside(Module):
    """Mixes tokens by torch's own attention module as well."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(VOCABULARY, 4, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net(batch[0])
        logits = x + self.own(x, x, x, need_weights=False)[0]
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Teacher(Module):
    """Has two models, and calls one of them past its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) + self.teacher.forward(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class LogsSometimes(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.strategy.ranks.context.cp.rank == 0:
            self.log("first", 1.0)
        return super().training_step(batch, batch_idx)


class SkipsSometimes(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.strategy.ranks.context.cp.rank == 0 else None


class CallsOutside(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class Undeclares(Module):
    """Declares the tokens alone, and passes documents."""

    sequence_dims: ClassVar[Any] = {"tokens": 1, "labels": 1}

    def __init__(self) -> None:
        super().__init__(GPTModel(SMALL))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        names = ("tokens", "labels", "document_ids")
        return self.net(**{name: batch[name] for name in names}).mean()


def _documents() -> DataLoader[Any]:
    rows = [
        {"tokens": tokens, "labels": labels, "document_ids": torch.arange(LENGTH) // 6}
        for tokens, labels in _loader().dataset
    ]
    return DataLoader(rows, batch_size=4)


class Placeless(Net):
    def sharding_plan(self) -> ShardingPlan:
        return ShardingPlan(modules={"layers.*.core": ContextAttention()})


class Outside(Module):
    """Has the plan itself, and calls the model without passing by its own forward."""

    def __init__(self) -> None:
        super().__init__(Bare())

    def sharding_plan(self) -> ShardingPlan:
        return ShardingPlan(modules={"net.layers.*.core": ContextAttention()}, positions="where")


class Bare(Net):
    sharding_plan = None  # type: ignore[assignment]


GPT = tiny_config(hidden_size=16, vocab_size=VOCABULARY, attention_dropout=0.1)
SMALL = tiny_config(num_layers=1, hidden_size=16, vocab_size=VOCABULARY)
STATES = tiny_config(
    layer_pattern="M-",
    hidden_size=16,
    vocab_size=VOCABULARY,
    mamba=MambaConfig(head_dim=8, state_dim=8, num_groups=1),
)
DELTA_NET = tiny_config(
    layer_pattern="G-",
    hidden_size=16,
    vocab_size=VOCABULARY,
    delta_net=DeltaNetConfig(num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8),
)
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "undeclared": (
        Undeclared,
        _loader,
        r"neither Undeclared nor its datamodule .* sequence_dims =",
    ),
    "length": (
        Module,
        lambda: _loader(14),
        r"14 positions, and context_parallel_size=2 needs a multiple of 4.* 12 or 16",
    ),
    "no row": (lambda: Module(Unbound()), _loader, r"no row of a sharding plan of Module binds"),
    "positions": (
        lambda: Module(Placeless()),
        _loader,
        r"no sharding plan of Module says .* ShardingPlan\(positions=...\)",
    ),
    "outside": (Outside, _loader, r"ran attention of a Outside and did not call the module itself"),
    "elsewhere": (
        lambda: Module(Net(Elsewhere)),
        _loader,
        r"layers.0.core is bound .* and the forward did not call it",
    ),
    "foreign": (
        lambda: Module(Net(Foreign)),
        _loader,
        r"calls scaled_dot_product_attention in a module that its sharding plan does not bind",
    ),
    "beside": (Beside, _loader, r"calls multi_head_attention_forward in a module"),
    "second model": (Teacher, _loader, r"ran attention of a Net and did not call the module"),
    "logs": (LogsSometimes, _loader, r"On some of them only, it logged 'first'"),
    "skips": (SkipsSometimes, _loader, r"training_step returned None on a rank that shares"),
    "outside of a step": (CallsOutside, _loader, r"was called outside of a training, valid"),
    "Mamba-2 outside of a step": (
        lambda: CallsOutside(GPTModel(STATES)),
        _loader,
        r"whose Mamba-2 is bound .* outside of a",
    ),
    "gated delta net outside of a step": (
        lambda: CallsOutside(GPTModel(DELTA_NET)),
        _loader,
        r"whose gated delta net is bound .* outside of a",
    ),
    "documents": (Undeclares, _documents, r"document_ids .* has 16 columns, .* 8 positions"),
    "masked": (Module, lambda: _loader(masked=True), r'-100 in 1, so that .* "num_items"'),
    "dropout": (
        lambda: GPTLightningModule(GPT),
        lambda: DataLoader([{"tokens": torch.ones(8).long(), "labels": torch.ones(8).long()}]),
        r"attention_dropout=0.1 cannot be combined with context_parallel_size=2. Set it to 0",
    ),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    make, data, _ = CASES[case]
    try:
        layout.trainer(folder, max_epochs=1).fit(make(), data())
    except MegatronLightningError as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:
        return f"peer: {error}"
    return None


@pytest.mark.spread(5)
@pytest.mark.parametrize("case", CASES)
def test_what_would_be_wrong_is_refused(case: str, tmp_path: Path) -> None:
    errors = run(CP2, _refused, tmp_path, case)
    said = [error for error in errors if error and not error.startswith("peer: ")]
    assert None not in errors and said, errors
    for error in said:
        assert re.search(CASES[case][2], error, re.DOTALL), error


class RowScores(Module):
    """Predicts one number a row, from a rank's tokens alone."""

    forward = None  # type: ignore[assignment]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean((1, 2))


class Scores(Module):
    """Predicts a number a token, which has its sequence in dim 0, and the rows' own numbers."""

    sequence_dims: ClassVar[Any] = {0: 1, 1: 1, "turned": 0}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0]).amax(-1)
        return {"turned": scores.t(), "scores": scores, "rows": torch.arange(len(scores))}


def _predict(layout: Layout, folder: str, kind: type[Module]) -> Any:
    module = kind()
    module.forward = module.net.forward  # Lightning asks for one
    try:
        return layout.trainer(folder).predict(module, _loader())
    except ConfigError as error:
        return str(error)


@layouts(CP2, slow=[CP4])
def test_predictions_have_their_sequences_joined(layout: Layout, tmp_path: Path) -> None:
    expected = run(SINGLE, _predict, tmp_path, Scores)[0]
    for rank in run(layout, _predict, tmp_path, Scores):
        for ours, theirs in zip(rank, expected, strict=True):
            for key, value in theirs.items():
                assert ours[key] == pytest.approx(value, rel=1e-5), key


def test_predictions_of_a_part_alone_are_refused(tmp_path: Path) -> None:
    for error in run(CP2, _predict, tmp_path, RowScores):
        assert re.search(r"a tensor \[4\] that differs between the 2 ranks", error), error


class Counts(Module):
    """Says how many tokens count by a method, as earlier stages need it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]).flatten(0, 1)
        losses = F.cross_entropy(logits, batch[1].flatten(), reduction="sum")
        return losses / self.num_items(batch)

    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class Prompts(Counts):
    """Most labels are left out, so that a rank may have none; means of torch's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", Prompts.training_step(self, batch, batch_idx), sync_dist=True)


class CollectsForTheEpoch(Module):
    """Logs what it has collected at the end of validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.collected = [*getattr(self, "collected", []), loss]

    def on_validation_epoch_end(self) -> None:
        self.log("val", torch.stack(self.collected).mean(), sync_dist=True)
        self.log("sum", torch.stack(self.collected).sum() * 0 + 1.0, sync_dist=True)
        self.collected.clear()


class Sums(Module):
    """Counts its tokens in a step, and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.report = StepReport()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        number = torch.tensor(float(batch[0].numel()))
        self.net(batch[0])
        self.report.value("in_layer", number, "sum")
        self.log("in_step", number, reduce_fx="sum", sync_dist=True)
        log_reports(self, prefix="val_")


def _validate(layout: Layout, folder: str) -> dict[str, float]:
    loader = DataLoader(_loader().dataset, batch_size=4 // layout.data)
    [logged] = layout.trainer(folder).validate(Sums(), loader, verbose=False)
    return {name: float(value) for name, value in logged.items()}


@layouts(CP2_DP2, slow=[CP2, CP2_MICRO])
def test_sums_count_every_token_once(layout: Layout, tmp_path: Path) -> None:
    assert run(SINGLE, _validate, tmp_path)[0] == {"in_step": 256.0, "val_in_layer": 256.0}
    for rank in run(layout, _validate, tmp_path):
        assert rank == {"in_step": 256.0, "val_in_layer": 256.0}


def _losses(
    layout: Layout, folder: str, kind: type[Module], masked: str | bool
) -> tuple[list[float], dict[str, float]]:
    module = kind()
    loader = _loader(masked=bool(masked))
    if masked == "prompts":
        for _, labels in loader.dataset:
            labels[: LENGTH - 3] = -100
    fit = layout.trainer(folder, max_epochs=2)
    fit.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    return [loss for loss, _ in module.seen], metrics


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "masked"), [(Counts, True), (Prompts, "prompts"), (CollectsForTheEpoch, False)]
)
@layouts(CP2, slow=[CP2_MICRO, CP4])
def test_means_are_over_the_items(
    layout: Layout, kind: type[Module], masked: str | bool, tmp_path: Path
) -> None:
    """Ranks have different numbers of labels, or none; fp32: 1e-5."""
    losses, metrics = run(SINGLE, _losses, tmp_path, kind, masked)[0]
    for rank in run(layout, _losses, tmp_path, kind, masked):
        assert rank[0] == pytest.approx(losses, rel=1e-5)
        if kind is not Counts:  # which logs a validation loss of all tokens
            assert rank[1] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("given", "sizes", "words"),
    [
        (
            "ring",
            None,
            r"'ring', which is unknown. Set it to one of p2p, all_gather, a2a, a2a\+p2p",
        ),
        (["p2p", "ring"], None, "cp_comm_type is 'ring', which is unknown"),
        ("a2a+p2p", None, r"hierarchical_context_parallel_sizes is not set. .* \[2, 2\]"),
        (["p2p", "a2a+p2p"], None, "hierarchical_context_parallel_sizes is not set"),
        ("a2a+p2p", [2, 2, 2], r"is \[2, 2, 2\]. Set it to two positive integers"),
        ("a2a+p2p", [4, 0], r"is \[4, 0\]. Set it to two positive integers"),
        (
            "a2a",
            [2, 2],
            r"sizes=\[2, 2\] are the levels .* cp_comm_type is 'a2a'. Set the sizes to",
        ),
        (["p2p", "a2a"], [2, 2], r"cp_comm_type is \['p2p', 'a2a'\]"),
    ],
)
def test_options_that_contradict_themselves(given: Any, sizes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ContextOptions(cp_comm_type=given, hierarchical_context_parallel_sizes=sizes)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("size", "sizes", "words"),
    [
        (
            8,
            [2, 2],
            r"\[2, 2\] are levels of 4 ranks, .* is 8. Set the sizes to \[2, 4\] or \[4, 2\]",
        ),
        (4, [4, 2], r"the sizes to \[4, 1\] or \[2, 2\], or context_parallel_size to 8"),
        (1, [2, 2], r"the sizes to \[1, 1\], or context_parallel_size to 4"),
    ],
)
def test_levels_are_those_of_the_context_parallel_ranks(
    size: int, sizes: list[int], words: str
) -> None:
    options = ContextOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=sizes)
    with pytest.raises(ConfigError, match=words):
        MegatronStrategy(context_parallel_size=size, context_options=options)


TYPES: list[Any] = ["p2p", "a2a", "all_gather", "p2p"]
CLASSES = ["RingAttention", "ExchangedAttention", "GatheredAttention", "RingAttention"]
CP2_PP2_VPP2 = make_layout(
    "cp2-pp2-vpp2",
    4,
    1,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=1,
    context_options=ContextOptions(cp_comm_type=TYPES),
)
CP2_TYPES = make_layout(
    "cp2-types", 2, 1, context_parallel_size=2, context_options=ContextOptions(cp_comm_type=TYPES)
)


def _rows() -> list[Any]:
    return [{"tokens": torch.ones(8).long(), "labels": torch.ones(8).long()}] * 2


def _gpt(num_layers: int = 4, **sizes: Any) -> GPTLightningModule:
    given = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCABULARY} | sizes
    return GPTLightningModule(tiny_config(num_layers=num_layers, **given))


def _bound(layout: Layout, folder: str) -> dict[int, str]:
    """Return by layer how the attention on this rank meets the keys of others."""
    module = _gpt()
    layout.trainer(folder, max_steps=1).fit(module, DataLoader(_rows(), batch_size=2))
    return {
        int(path.split(".")[-3]): type(child.cp_comm).__name__
        for path, child in present_modules(module)
        if isinstance(child, CoreAttention)
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CP2_TYPES, CP2_PP2_VPP2], ids=lambda layout: layout.name)
def test_a_layer_has_its_entry_wherever_it_is(layout: Layout, tmp_path: Path) -> None:
    """Losses do not tell: they are the same with every type."""
    ranks = run(layout, _bound, tmp_path)
    for found in ranks:
        assert len(found) == (4 if layout is CP2_TYPES else 2)
        assert found == {index: CLASSES[index] for index in found}
    assert set().union(*ranks) == set(range(4))


class Towers(Module):
    """Two models with a plan each; the second one uses a layer twice."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"a": Net(), "b": Net()}))
        self.net["b"].layers.append(self.net["b"].layers[0])


def test_entries_count_the_modules_of_all_plans_once() -> None:
    module = Towers()
    plans = assign_cp_comm_types(module, find_plans(module, None), TYPES)
    found = {
        f"{owner}.{path}": plan.style_of(path)
        for owner, plan in plans.items()
        for path, child in module.get_submodule(owner).named_modules(remove_duplicate=False)
        if isinstance(child, CoreAttention)
    }
    expected = dict(
        zip(("a.layers.0", "a.layers.1", "b.layers.0", "b.layers.1"), TYPES, strict=True)
    )
    expected["b.layers.2"] = TYPES[2]
    assert found == {
        f"net.{path}.core": ContextAttention(cp_comm_type=entry) for path, entry in expected.items()
    }


@pytest.mark.parametrize("make", [_gpt, Towers], ids=["gpt", "towers"])
def test_a_list_of_another_length_is_refused_before_launch(make: Callable[[], Any]) -> None:
    options = ContextOptions(cp_comm_type=["p2p", "a2a", "p2p"])
    strategy = MegatronStrategy(context_parallel_size=2, context_options=options)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    with pytest.raises(
        ConfigError, match=r"lists 3 types, .* binds 4 attention modules .* List 4,"
    ):
        trainer.fit(make(), _loader())
    assert not dist.is_initialized()


def test_rows_name_one_type() -> None:
    options = ContextOptions(cp_comm_type=TYPES)
    layout = ParallelLayout(context_parallel_size=2)
    context = ParallelContext(layout, planned_world_size=2, context_options=options)
    for style, words in (
        (ContextAttention(), r"is \['p2p', 'a2a', .* one of p2p, all_gather, a2a, a2a\+p2p"),
        (ContextAttention(cp_comm_type="ring"), "is 'ring'"),  # type: ignore[arg-type]
        (ContextAttention(cp_comm_type="a2a+p2p"), "hierarchical_context_parallel_sizes=..."),
    ):
        with pytest.raises(ShardingError, match=words):
            style.apply(CoreAttention(0.0), context, Net.plan)


def test_a_model_with_a_window_sees_no_further() -> None:
    config = tiny_config(num_layers=1, hidden_size=16, vocab_size=20, window_size=(3, 0))
    model, tokens = GPTModel(config), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 4] = 19
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same.tolist() == [at not in range(4, 8) for at in range(12)]
    with pytest.raises(ConfigError, match="window_size"):
        tiny_config(num_layers=1, hidden_size=16, vocab_size=20, window_size=(3, 1))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("size", "given", "levels", "words"),
    [
        (
            4,
            "a2a",
            None,
            r"6 attention heads .* over 4 ranks, context_parallel_size. .* \[1, 2, 3, 6\]",
        ),
        (4, ["p2p", "a2a"], None, r'cp_comm_type="a2a" divides the 6 attention heads'),
        (8, "a2a+p2p", [4, 2], r"over 4 ranks, the first of hierarchical_context_parallel_sizes"),
        (8, ["a2a+p2p", "a2a"], [2, 4], r'cp_comm_type="a2a" divides .* over 8 ranks'),
    ],
)
def test_heads_that_cannot_be_exchanged_are_refused_before_launch(
    size: int, given: Any, levels: Any, words: str
) -> None:
    options = ContextOptions(cp_comm_type=given, hierarchical_context_parallel_sizes=levels)
    strategy = MegatronStrategy(context_parallel_size=size, context_options=options)
    module = _gpt(2, hidden_size=24, num_attention_heads=6, kv_channels=4)
    with pytest.raises(ConfigError, match=words):
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=size, logger=False).fit(
            module, DataLoader(_rows())
        )


def test_autocast_reaches_our_attention_as_it_does_torchs() -> None:
    q, k, v = torch.randn(3, 6, 2, 4, 8).unbind()
    core = CoreAttention(0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = core(q.bfloat16(), k, v, SequenceInfo(window=5))  # sees all positions
        assert whole.dtype == core(q, k, v).dtype == torch.bfloat16
    assert torch.allclose(whole.float(), core(q, k, v), atol=3e-2)  # bf16


class Shifts(Module):
    """Selects positions in its step, outside of the model."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, *batch)


def _shifts_logits(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens).float().contiguous()
    return F.cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


def _shifts_tokens(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _shifts_on_a_device(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    with torch.device("cpu"):  # a mode of torch functions
        return _shifts_logits(net, tokens, labels)


def _rolls(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def _takes_last(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).select(1, -1), labels[:2, ..., :].float().mean(1).long())


def _splits(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    first, _ = net(tokens).split([labels.shape[1] - 1, 1], dim=1)
    return F.cross_entropy(
        first.flatten(0, 1), labels.split([1, labels.shape[1] - 1], 1)[1].flatten()
    )


def _loses_in_chunks(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    pieces = zip(logits.split(2, dim=1), labels.split(2, dim=1), strict=True)
    losses = [F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in pieces]
    return torch.stack(losses).sum() / labels.numel()


def _selects_nothing(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)[:, 0:]
    mask = labels >= 0
    return F.cross_entropy(logits[mask], labels[:, :].narrow(1, 0, labels.shape[1])[mask])


def _pools(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return net(tokens).mean(1).logsumexp(-1).mean()


def _adds_up_samples(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    return -F.logsigmoid(losses.view_as(labels).sum(dim=-1)).mean()


def _averages_samples(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = net(tokens)
    losses = logits.logsumexp(-1) - logits.gather(-1, labels[..., None]).squeeze(-1)
    return losses.mean(1).mean()


def _warned(layout: Layout, folder: str, loss: Any) -> str:
    said: list[str] = []
    with patch("megatron_lightning.step.judge.rank_zero_warn", said.append):
        layout.trainer(folder, max_steps=1).fit(Shifts(loss), _loader())
    return " ".join(said)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (_pools, "calls mean over dim 1 of a sequence"),
        (_averages_samples, ""),
        pytest.param(
            _adds_up_samples, "calls sum over dim 1 of a sequence", marks=pytest.mark.slow
        ),
    ],
)
def test_steps_that_reduce_over_a_part_are_named(loss: Any, text: str, tmp_path: Path) -> None:
    found = run(CP2, _warned, tmp_path, loss)[0]
    assert text in found
    assert bool(found) == bool(text)


def _shifted(layout: Layout, folder: str, loss: Any) -> str:
    module = Shifts(loss)
    try:
        layout.trainer(folder, max_steps=1).fit(module, _loader())
    except ConfigError as error:
        return str(error)
    except PeerFailure:
        return ""
    return "passes"


@pytest.mark.parametrize(
    ("loss", "text"),
    thinned(
        [
            (_shifts_logits, "slices or indexes a sequence along dim 1"),
            (_shifts_on_a_device, "slices or indexes a sequence along dim 1"),
            (_shifts_tokens, "slices or indexes a sequence along dim 1"),
            (_rolls, "calls roll on a sequence along dim 1"),
            (_selects_nothing, "passes"),
            (_takes_last, "calls select on a sequence along dim 1"),
            (_splits, "calls split on a sequence along dim 1"),
            (_loses_in_chunks, "passes"),
        ]
    ),
)
def test_steps_that_select_positions_are_refused(loss: Any, text: str, tmp_path: Path) -> None:
    found = run(CP2, _shifted, tmp_path, loss)
    assert any(found)
    assert all(not each or text in each for each in found), found
