"""Runs with compiled blocks beyond training on batches of one shape: other lengths, documents,
checkpoints, validation and prediction; and models of others.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import CompileOptions, MoEConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.language_model import VOCABULARY, small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.parity.test_compiled import ONE_F_ONE_B, TP, _Graphs

pytestmark = pytest.mark.timeout(300)

EP, CP = "expert_model_parallel_size", "context_parallel_size"
BATCH = 4


def _strategy(compiled: bool, **options: Any) -> MegatronStrategy:
    if compiled:
        options |= {"compile": "block", "compile_options": CompileOptions(backend="aot_eager")}
    return MegatronStrategy(**options)


class _Growth(pl.Callback):
    """Graphs after every batch."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _documents(length: int, step: int) -> Tensor:
    """Two to four documents a row, others in each row and each step."""
    places = torch.arange(length).expand(BATCH, length)
    ends = torch.arange(1, BATCH + 1)[:, None] + step
    return (places > ends).long() + (places > ends + 3).long() + (places > ends + step + 5).long()


def _batches(lengths: list[int], *, packed: bool) -> Any:
    generator = torch.Generator().manual_seed(3)
    batches: Any = []
    for step, length in enumerate(lengths):
        text = torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator)
        batches.append({"tokens": text[:, :-1], "labels": text[:, 1:]})
        if packed:
            batches[-1]["document_ids"] = _documents(length, step)
    return batches


def _grow(
    lengths: list[int], layout: dict[str, Any], model: dict[str, Any], packed: bool
) -> list[Any]:
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = GPTLightningModule(small_gpt(2, **model), learning_rate=1e-3)
        losses, growth = Losses(), _Growth()
        fit = trainer(_strategy(compiled, **layout), max_epochs=1, callbacks=[losses, growth])
        fit.fit(module, DataLoader(_batches(lengths, packed=packed), batch_size=None))
        results.append((losses.losses, losses.norms, growth.graphs))
    return results


LENGTHS = [8, 16, 12, 20, 8, 24]
EXPERTS = {"moe": MoEConfig(num_experts=4)}
GROWING = {
    # Sizes are symbols from the second length on.
    "lengths": (1, LENGTHS, {}, {}, False, [1, 2, 2, 2, 2, 2]),
    "lengths-tp2": (2, LENGTHS, {TP: 2}, {}, False, [1, 2, 2, 2, 2, 2]),
    # The first step of context-parallel ranks is watched, and runs uncompiled.
    "lengths-cp2": (2, LENGTHS, {CP: 2}, {}, False, [0, 1, 2, 2, 2, 2]),
    # Each of the four parts of a block; the experts' rows differ anyway. Two ranks share batches.
    "lengths-experts": (2, [8, 8, 16, 16, 12, 12], {EP: 2}, EXPERTS, False, [5, 8, 8]),
    "documents": (1, [24] * 5, {}, {}, True, [1] * 5),
    "documents-tp2": (2, [24] * 5, {TP: 2}, {}, True, [1] * 5),
    "documents-cp2": (2, [24] * 5, {CP: 2}, {}, True, [0, 1, 1, 1, 1]),
    "documents-lengths": (1, [24, 16, 32, 20], {}, {}, True, [1, 2, 2, 2]),
    "documents-lengths-tp2": (2, [24, 16, 32], {TP: 2}, {}, True, [1, 2, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_other_shapes_and_documents_do_not_compile_each_time(name: str) -> None:
    ranks, *given, expected = GROWING[name]
    for (losses, norms, _), (own_losses, own_norms, graphs) in run_ranks(
        ranks, _grow, *given, timeout_s=280
    ):
        assert own_losses == pytest.approx(losses, rel=1e-6)  # rounding of fp32
        assert own_norms == pytest.approx(norms, rel=1e-6)
        assert graphs == expected


# --------------------------------------------------------------------------- checkpoints and after


def _module() -> GPTLightningModule:
    return GPTLightningModule(small_gpt(2), learning_rate=1e-3)


def _data() -> DataLoader[Any]:
    return DataLoader(_batches([8] * 4, packed=False), batch_size=None)


def _resumed(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Stop after two of four steps and resume, with and without compiled blocks before and
    after."""
    results: dict[str, Any] = {}
    for before in (False, True):
        path = f"{folder}/compiled-{before}.ckpt"
        record = Losses()
        first = trainer(_strategy(before, **layout), max_steps=4, callbacks=[record])
        first.fit(_module(), _data())
        results[f"whole-{before}"] = record.losses
        stopped = trainer(_strategy(before, **layout), max_steps=2)
        module = _module()
        stopped.fit(module, _data())
        stopped.save_checkpoint(path)
        results[f"keys-{before}"] = sorted(module.state_dict())
        for after in (False, True):
            record = Losses()
            second = trainer(_strategy(after, **layout), max_steps=4, callbacks=[record])
            second.fit(_module(), _data(), ckpt_path=path)
            results[f"{before}-{after}"] = record.losses
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (4, {TP: 2, **ONE_F_ONE_B})])
def test_checkpoints_do_not_know_whether_blocks_were_compiled(
    ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run is bit-equal to one that was never stopped; one that goes on in the other way
    rounds otherwise."""
    for results in run_ranks(ranks, _resumed, str(tmp_path), layout, timeout_s=280):
        assert results["keys-False"] == results["keys-True"]
        for way in (False, True):
            assert results[f"{way}-{way}"] == results[f"whole-{way}"][2:]
            assert results[f"{way}-{not way}"] == pytest.approx(
                results[f"whole-{way}"][2:], rel=1e-6
            )


def _evaluate(layout: dict[str, Any]) -> list[Any]:
    results = []
    for compiled in (False, True):
        graphs, module = _Graphs(), _module()
        runner = trainer(_strategy(compiled, **layout))
        [metrics] = runner.validate(module, _data(), verbose=False)
        batches: Any = [{"tokens": batch["tokens"]} for batch in _data()]
        predicted = trainer(_strategy(compiled, **layout)).predict(
            module, DataLoader(batches, batch_size=None)
        )
        graphs.on_train_end()
        tokens = [batch.tolist() for batch in predicted]
        results.append((metrics["val_loss"], tokens, graphs.count, graphs.breaks))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {TP: 2}), (2, ONE_F_ONE_B)])
def test_compiled_blocks_evaluate_and_predict(ranks: int, layout: dict[str, Any]) -> None:
    for (loss, tokens, *_), (own_loss, own_tokens, graphs, breaks) in run_ranks(
        ranks, _evaluate, layout, timeout_s=280
    ):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own_tokens == tokens
        assert (graphs, breaks) == (1, {})  # of both


# ------------------------------------------------------------------------------- models of others


class _OfTorchLayers(pl.LightningModule):
    """A user's module: torch's encoder layers in a list, a Sequential or torch's own encoder."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        if container == "encoder":
            self.body: nn.Module = nn.TransformerEncoder(_layer(), 3, enable_nested_tensor=False)
        else:
            layers = [_layer() for _ in range(3)]
            self.body = nn.Sequential(*layers) if container == "seq" else nn.ModuleList(layers)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        layers = self.body if isinstance(self.body, nn.ModuleList) else [self.body]
        for layer in layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)


def _others(name: str, layout: dict[str, Any]) -> list[Any]:
    results = []
    for compiled in (False, True):
        pl.seed_everything(3, verbose=False)
        if name in ("list", "seq", "encoder"):
            module: Any = _OfTorchLayers(name)
            data = _data()
        else:
            module, data = hf_models.Untouched(name.partition("+")[0]), hf_models.loader("llama")
            module.model.config.use_cache = name.endswith("+cache")
        record, graphs = Losses(), _Graphs()
        with warnings.catch_warnings(record=True) as caught:
            fit = trainer(_strategy(compiled, **layout), max_epochs=1, callbacks=[record, graphs])
            warnings.simplefilter("always")
            fit.fit(module, data)
        said = any("use_cache" in str(warning.message) for warning in caught)
        results.append((record.losses, record.norms, graphs.count, graphs.breaks, said))
    return results


OTHERS = {
    "list": (1, {}, 1),
    "list-pp2": (2, ONE_F_ONE_B, 1),
    "seq": (1, {}, 1),
    "encoder": (1, {}, 1),
    "llama": (1, {}, 1),
    "llama-tp2": (2, {TP: 2}, 1),
    "llama-pp2": (2, ONE_F_ONE_B, 1),
    "llama+cache": (1, {}, 4),  # a layer's graph depends on what the cache holds for it
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "encoder" else pytest.mark.slow) for n in OTHERS]
)
def test_models_of_others_compile_without_changes(name: str) -> None:
    ranks, layout, num_graphs = OTHERS[name]
    for plain, (losses, norms, graphs, breaks, said) in run_ranks(
        ranks, _others, name.partition("-")[0], layout, timeout_s=280
    ):
        assert losses == pytest.approx(plain[0], rel=1e-6)
        assert norms == pytest.approx(plain[1], rel=1e-6)
        assert (graphs, breaks, said) == (num_graphs, {}, "cache" in name)
