"""Communication and memory of a step with ``data_parallel="fsdp"``: counted and measured, not
estimated."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions, MoEConfig
from megatron_lightning.models import num_parameters
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.parity.test_layouts import GLOBAL_BATCH, _config, _samples

PP, VPP, TP, EP = (
    f"{axis}_model_parallel_size" for axis in ("pipeline", "virtual_pipeline", "tensor", "expert")
)
ETP = "expert_tensor_parallel_size"
MOE = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=24)
RESHARD = DataParallelOptions(reshard_after_forward=True)
EVERY = DataParallelOptions(reduce_every_microbatch=True)
BOTH = DataParallelOptions(reshard_after_forward=True, reduce_every_microbatch=True)
HYBRID = DataParallelOptions(num_distributed_optimizer_instances=2)
# Embedding, five layers, final norm, output layer; micro-batches of a rank of two.
UNITS, MICRO = 8, 4


class _Collectives(TorchDispatchMode):
    """Counts the gathers of parameters and the reduce-scatters of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            self.counts["gather" if "gather" in name else "reduce"] += 1
        return func(*args, **(kwargs or {}))


class _Counting(pl.Callback):
    """Counts in the second step and in one batch of validation after it."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self._counting: Iterator[None] | None = None

    @contextmanager
    def _counts(self, what: str) -> Iterator[None]:
        with _Collectives() as seen:
            yield
        self.found[what] = dict(seen.counts)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self._counting = self._counts("step")
            self._counting.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        if args[-1] == 1:
            self._counting.__exit__(None, None, None)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._counting = self._counts("validation")
        self._counting.__enter__()

    def on_validation_batch_end(self, *_: Any) -> None:
        self._counting.__exit__(None, None, None)


def _count(options: dict[str, Any], replicas: int) -> dict[str, dict[str, int]]:
    counting = _Counting()
    strategy = MegatronStrategy(data_parallel="fsdp", **options)
    fit = trainer(
        strategy, max_steps=2, callbacks=[counting], limit_val_batches=1, val_check_interval=2
    )
    loader = DataLoader(_samples(), batch_size=GLOBAL_BATCH // replicas)
    fit.fit(GPTLightningModule(_config(), learning_rate=1e-3), loader, loader)
    return counting.found


def _count_all(cases: list[tuple[dict[str, Any], int]]) -> list[dict[str, dict[str, int]]]:
    return [_count(options, replicas) for options, replicas in cases]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(0, 3, 4), (1, 2, 5)], ids=["some", "others"])
def test_units_are_gathered_and_reduced_as_often_as_the_options_say(
    chosen: tuple[int, ...],
) -> None:
    micro = {"micro_batch_size": 1}
    # Options, gathers and reduce-scatters of each unit in a step.
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({}, 2, 1),
        ({"data_parallel_options": DataParallelOptions(reshard_after_forward=False)}, 1, 1),
        (micro, 1, 1),
        ({**micro, "data_parallel_options": RESHARD}, 2 * MICRO, 1),
        ({**micro, "data_parallel_options": EVERY}, 1, MICRO),
        ({**micro, "data_parallel_options": BOTH}, 2 * MICRO, MICRO),
    ]
    cases = [cases[index] for index in chosen]
    found = run_ranks(2, _count_all, [(options, 2) for options, _, _ in cases], timeout_s=100)
    for rank in found:
        for (options, gathers, reductions), counts in zip(cases, rank, strict=True):
            assert counts["step"] == {"gather": gathers * UNITS, "reduce": reductions * UNITS}, (
                options
            )
            assert "reduce" not in counts["validation"], options
            assert counts["validation"]["gather"] == (MICRO if gathers > 2 else 1) * UNITS, options


@pytest.mark.slow
def test_a_pipeline_gathers_and_reduces_each_unit_once_a_step() -> None:
    """On each stage, whatever the schedule; with several instances the reduce-scatter stays inside
    one of them."""
    micro = {PP: 2, "micro_batch_size": 1}
    cases: list[dict[str, Any]] = [
        micro,
        {**micro, VPP: 2},
        {**micro, "pipeline_schedule": "zb-h1"},
        {**micro, VPP: 2, "pipeline_schedule": "zbv"},
        {TP: 2, "micro_batch_size": 1},
        {"micro_batch_size": 1, "data_parallel_options": HYBRID},
    ]
    replicas = [2, 2, 2, 2, 2, 4]
    found = run_ranks(4, _count_all, list(zip(cases, replicas, strict=True)), timeout_s=100)
    for index, options in enumerate(cases):
        ranks = [rank[index]["step"] for rank in found]
        assert all(counts["gather"] == counts["reduce"] for counts in ranks), (options, ranks)
        # Of two stages, or twice the only one.
        first, *_, last = (counts["gather"] for counts in ranks)
        assert (first + last if PP in options else first) == UNITS, (options, ranks)


# ------------------------------------------------------------------------------------------- memory

WORLD = 4
LARGE = tiny_config(
    num_layers=12, hidden_size=512, num_attention_heads=8, ffn_hidden_size=1024, vocab_size=1024
)
MIB = 2**20


class _Peak(pl.Callback):
    """Takes the process's size in bytes before the model is built, and its greatest size so far
    when training would start."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def setup(self, *_: Any, **__: Any) -> None:
        self.sizes.append(psutil.Process().memory_info().rss)

    def on_fit_start(self, *_: Any) -> None:
        self.sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _grown(options: dict[str, Any]) -> int:
    """Return by how much a rank has grown until training starts."""
    # In the first, tiny fit libraries are loaded and groups get their buffers.
    for config in (_config(), LARGE):
        peak = _Peak()
        fit = trainer(MegatronStrategy(**options), max_steps=0, callbacks=[peak])
        fit.fit(GPTLightningModule(config), DataLoader(_samples(), batch_size=2))
    return peak.sizes[1] - peak.sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {TP: 2}], ids=["dp4", "tp2-dp2"])
def test_a_rank_builds_no_more_than_its_shard_and_one_parameter(options: dict[str, Any]) -> None:
    whole = num_parameters(LARGE) * 4
    largest = max(2 * LARGE.ffn_size, LARGE.qkv_rows, LARGE.vocab_size) * LARGE.hidden_size * 4
    # The draw of a parameter takes as much again as the parameter; the rest is for pages that the
    # allocator keeps.
    allowed = whole // WORLD + 4 * largest + 16 * MIB
    assert allowed < 0.6 * whole, "the bound would say nothing"
    for grown in run_ranks(WORLD, _grown, {"data_parallel": "fsdp", **options}, timeout_s=110):
        assert whole // WORLD <= grown <= allowed, (grown / MIB, allowed / MIB, whole / MIB)


class _Experts(pl.Callback):
    """Counts between steps the bytes of experts' parameters that are on this rank: the shards, and
    what is still gathered; also the shards of their optimizer state."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        units = [unit for unit in trainer.strategy.part.units.units if "experts" in unit.path]
        shards = [shard.to_local() for unit in units for shard in unit.shards.values()]
        gathered = [p for unit in units for p in unit.gathered.values()]
        held = {shard.data_ptr() for shard in shards}
        [optimizer] = trainer.optimizers
        stepped = [t for t in optimizer.state if t.data_ptr() in held]
        moments = [optimizer.state[t]["exp_avg"].nbytes for t in stepped]
        self.found.append(
            (
                sum(shard.untyped_storage().nbytes() for shard in shards),
                sum(p.untyped_storage().nbytes() for p in gathered),
                sum(moments),
            )
        )


def _expert_bytes(options: dict[str, Any]) -> list[tuple[int, int, int]]:
    counting = _Experts()
    strategy = MegatronStrategy(data_parallel="fsdp", **options)
    fit = trainer(strategy, max_steps=3, callbacks=[counting])
    module = GPTLightningModule(_config(moe=MOE), learning_rate=1e-3)
    fit.fit(module, DataLoader(_samples(), batch_size=2))
    return counting.found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {EP: 2}),  # one of two experts
        (4, {TP: 2, ETP: 2, "data_parallel_options": RESHARD, "micro_batch_size": 1}),
        (4, {EP: 2, "micro_batch_size": 1}),
        (4, {TP: 4, ETP: 1, EP: 2}),
        (8, {EP: 4}),  # half of one expert
        (8, {}),  # half of every expert
    ],
)
def test_a_rank_keeps_its_share_of_the_experts(ranks: int, options: dict[str, Any]) -> None:
    """Between steps E / ep / edp of their parameters, and of each moment; nothing of the others.
    Bytes are counted."""
    config = _config(moe=MOE)
    full = 4 * config.num_layers * MOE.num_experts * 3 * config.hidden_size * config.expert_ffn_size
    # ep x etp x edp ranks hold every expert once.
    shares = [full // ranks, 0]
    for found in run_ranks(ranks, _expert_bytes, options, timeout_s=100):
        assert [list(step[:2]) for step in found] == [shares] * 3
        assert [step[2] for step in found] == [0, full // ranks, full // ranks]


def _initial(options: dict[str, Any] | None) -> dict[str, Any]:
    fit = trainer("auto" if options is None else MegatronStrategy(**options), max_steps=0)
    module = GPTLightningModule(_config())
    fit.fit(module, DataLoader(_samples(), batch_size=2))
    whole: dict[str, Tensor] = {
        n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in module.named_parameters()
    }
    return {name: value.detach().numpy() for name, value in whole.items()}


def test_shards_begin_with_the_values_of_one_device() -> None:
    """Uneven rows too: the sizes do not divide by three."""
    expected = run_ranks(1, _initial, None)[0]
    for rank in run_ranks(3, _initial, {"data_parallel": "fsdp"}):
        assert rank.keys() == expected.keys()
        assert all((rank[name] == expected[name]).all() for name in expected)
