"""Optimizers by name, frozen parameters and named schedules of our modules train on every layout as
in one process of plain Lightning, and resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import DPOModule, GPTLightningModule
from megatron_lightning.modules.frozen_parameters import summary_of
from megatron_lightning.optim import ChainedOptimizer, Muon
from megatron_lightning.peft import LoRA
from tests.helpers.layouts import (
    BATCH,
    LAYOUTS,
    Losses,
    fit,
    tiny_config,
    token_rows,
)
from tests.helpers.ranks import run_ranks

STEPS = 4
CHAIN = {
    "class_path": "megatron_lightning.optim.ChainedOptimizer",
    "init_args": {
        "optimizers": [
            {"class_path": "Muon", "params": ["**.layers.**"], "init_args": {"lr": 0.02}},
            {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}},
        ]
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
        "lr_schedule": "linear",
    },
    "chain": {"optimizer": CHAIN, "lr_schedule": "wsd", "warmup_steps": 1},
    "frozen": {"freeze": ["model.decoder.layers.0", "**norm.weight"], "lr_schedule": "cosine"},
    # A pipeline stage trains nothing.
    "head": {"train_only": ["**.output_layer.weight"], "optimizer": "SGD", "learning_rate": 0.1},
    "embedding": {"train_only": ["embedding"], "optimizer": CHAIN["init_args"]["optimizers"][1]},
}
LAYERS = 2


class _Saves(pl.Callback):
    """Save a checkpoint after two steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.path)


def _trained(layout: str, folder: Path, resumes: bool, cases: Any = OPTIONS) -> dict[str, Any]:
    """Return losses and gradient norms of every case, and of its last steps after a resume."""
    config = tiny_config(num_layers=LAYERS)
    rows = token_rows(STEPS * BATCH, 16, 64)
    results = {}
    for case in cases:
        batch_size = BATCH // LAYOUTS[layout].data
        runs = []
        for ckpt_path in (None, folder / case)[: 1 + resumes]:
            record = Losses()
            pl.seed_everything(3)
            fit(
                layout,
                GPTLightningModule(config, **OPTIONS[case]),
                DataLoader(rows, batch_size=batch_size),
                steps=STEPS,
                record=record,
                ckpt_path=ckpt_path,
                callbacks=[_Saves(folder / case)] if resumes and ckpt_path is None else [],
                gradient_clip_val=1.0,
                enable_model_summary=False,
            )
            runs.append((record.losses, record.norms))
        results[case] = runs
    return results


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of plain Lightning. Muon takes the parts of fused weights apart under
    MegatronStrategy."""
    (result,) = run_ranks(1, _trained, "single", tmp_path_factory.mktemp("x"), False)
    (one,) = run_ranks(1, _trained, "one", tmp_path_factory.mktemp("x"), False, ["chain"])
    result["chain"] = one["chain"]
    assert len({tuple(runs[0][0]) for runs in result.values()}) == len(OPTIONS)
    return result


def _means(ranks: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("pp2", "tp2", "dp2-zero1", "ddp2", "cp2", "tp2-pp2")
        ),
    ],
)
def test_a_layout_equals_plain_lightning_and_resumes(
    layout: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(LAYOUTS[layout].ranks, _trained, layout, tmp_path, True)
    for case, ((losses, norms),) in expected.items():
        whole, resumed = (
            [
                [
                    sum(step) / len(step)
                    for step in zip(*(r[case][run][i] for r in results), strict=True)
                ]
                for i in range(2)
            ]
            for run in range(2)
        )
        rel = 2e-4 if case == "chain" else 1e-5  # Muon multiplies in bf16
        assert whole[0] == pytest.approx(losses, rel=rel), case
        assert whole[1] == pytest.approx(norms, rel=rel * 10), case
        assert resumed[0] == whole[0][STEPS // 2 :], case


def _module(**options: Any) -> Any:
    return GPTLightningModule(tiny_config(), **options)


def _built(**options: Any) -> tuple[Any, Any]:
    module = _module(**options)
    module.configure_model()
    return module, module.configure_optimizers()


def test_the_default_is_adamw_with_its_numbers() -> None:
    _, optimizer = _built()
    assert type(optimizer) is torch.optim.AdamW
    groups = [(g["name"], g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups]
    assert groups == [("default", 3e-4, 0.1, (0.9, 0.95)), ("no_decay", 3e-4, 0.0, (0.9, 0.95))]


def test_a_named_optimizer_has_the_defaults_of_its_class() -> None:
    adam = {"class_path": "torch.optim.AdamW", "init_args": {"betas": [0.8, 0.9]}}
    table = [{"name": "head", "params": ["**.output_layer.weight"], "options": {"weight_decay": 1}}]
    _, optimizer = _built(optimizer=adam, learning_rate=0.5, param_groups=table)
    values = [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups]
    assert values == [(0.5, 0.01, (0.8, 0.9)), (0.5, 1, (0.8, 0.9))]
    _, optimizer = _built(optimizer={"class_path": "SGD", "lr": 0.2, "weight_decay": 0.3})
    values = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert values == [(0.2, 0.3), (0.2, 0.0)]


def test_a_chain_steps_the_matrices_of_layers_by_muon() -> None:
    module, optimizer = _built(
        optimizer={"class_path": "ChainedOptimizer", "optimizers": ["Muon", "AdamW"]}
    )
    assert isinstance(optimizer, ChainedOptimizer)
    assert [type(member) for member in optimizer.optimizers] == [Muon, torch.optim.AdamW]
    names = {id(p): name for name, p in module.named_parameters()}
    of_muon, of_adam = (
        {names[id(p)] for g in member.param_groups for p in g["params"]}
        for member in optimizer.optimizers
    )
    assert {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"} == {
        name.split(".")[-2] for name in of_muon
    }
    assert of_muon | of_adam == set(names.values()) and not of_muon & of_adam
    group_names = [g["name"] for g in optimizer.param_groups]
    assert group_names == [f"{k}/{g}" for k in ("Muon", "AdamW") for g in ("default", "no_decay")]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no class": ({"optimizer": {"lr": 0.1}}, "without the class_path of an optimizer"),
    "argument": (
        {"optimizer": {"class_path": "torch.optim.SGD", "momentun": 1}},
        r"no argument 'momentun'.*Did you mean 'momentum'\?",
    ),
    "value": ({"optimizer": {"class_path": "SGD", "lr": -1}}, "cannot be made with.*Invalid"),
    "not imported": ({"optimizer": "nowhere.Lion"}, "in no module imported so far.*optimizer="),
    "no optimizer": ({"optimizer": "torch.nn.Linear"}, "is no optimizer"),
    "of adamw": ({"optimizer": "SGD", "betas": (0.5, 0.5)}, "betas=.*is an option of AdamW"),
    "two rates": (
        {"optimizer": {"class_path": "SGD", "lr": 0.1}, "learning_rate": 0.2},
        "learning_rate is 0.2, and init_args of the optimizer have lr=0.1",
    ),
    "vectors": ({"optimizer": "Muon"}, "neither a matrix nor.*first of a ChainedOptimizer"),
    "chain": ({"optimizer": "ChainedOptimizer"}, "ChainedOptimizer with 0 optimizers"),
    "pattern": (
        {"optimizer": {"class_path": "ChainedOptimizer", "optimizers": [
            {"class_path": "Muon", "params": ["**.linear_qk.weight"]}, "SGD"]}},
        r"'\*\*\.linear_qk\.weight', which matches no trained.*did you mean",
    ),
    "params alone": (
        {"optimizer": {"class_path": "SGD", "params": ["**.bias"]}},
        r"SGD has params=\['\*\*\.bias'\].*this optimizer is alone\. Set train_only",
    ),
    "params as an argument": (
        {"optimizer": {"class_path": "AdamW", "init_args": {"params": "**"}}}, "Set train_only",
    ),
    "params of a chain": (
        {"optimizer": {**CHAIN, "params": ["**"]}}, "Set params of its optimizers; train_only",
    ),
    "left over": (
        {"optimizer": {"class_path": "ChainedOptimizer", "optimizers": ["Muon"]}},
        "no optimizer of the chain steps 7 parameters",
    ),
    "taken": (
        {"optimizer": {"class_path": "ChainedOptimizer", "optimizers": [
            {"class_path": "AdamW", "params": ["**"]}, "SGD"]}},
        "SGD of the chain steps no parameter",
    ),
    "frozen nothing": (
        {"freeze": ["decoder.layer.0"]},
        r"'decoder\.layer\.0', which matches no parameter.*did you mean 'decoder\.layers\.0'",
    ),
    "frozen all": ({"freeze": ["**"]}, "matches all 15 parameters"),
    "both": ({"freeze": ["**.weight"], "train_only": ["**"]}, "Leave one out"),
    "a text": ({"train_only": "**"}, r"Set train_only=\[\*\*\]"),
    "adapters": (
        {"freeze": ["embedding"], "peft": LoRA(r=2)},
        "given beside peft, and adapters freeze all weights",
    ),
    "schedule": ({"lr_schedule": "exponential"}, "must be one of linear, cosine, wsd"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_says_what_to_set(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        _built(**options)


def test_frozen_parameters_are_counted_and_hide_no_method() -> None:
    module = _module(train_only=["model.output_layer", "**norm.weight"])
    module.configure_model()
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained == [n for n, _ in module.named_parameters() if "norm" in n or "output" in n]
    text = summary_of(module.model)
    assert (
        text == "train_only: 6 of 15 parameters of GPTModel are trained (2,208 of 37,024 values)."
    )
    assert module.train(False) is module and not module.training
    module.freeze()  # Lightning's own
    assert not any(p.requires_grad for p in module.parameters())


def test_a_tied_parameter_has_two_names() -> None:
    config = tiny_config(share_embeddings_and_output_weights=True)
    for pattern in ("output_layer", "embedding.word_embeddings"):
        module = GPTLightningModule(config, freeze=[pattern])
        module.configure_model()
        assert not module.model.embedding.word_embeddings.weight.requires_grad


def test_a_module_around_another_takes_its_options() -> None:
    inner = _module(optimizer=CHAIN, train_only=["decoder"], lr_schedule="linear", decay_steps=10)
    module = DPOModule(inner, loss="orpo")
    module.configure_model()
    configured: Any = module.configure_optimizers()
    assert isinstance(configured["optimizer"], ChainedOptimizer)
    scheduler = configured["lr_scheduler"]["scheduler"]
    assert scheduler.schedule.lr_decay_style == "linear"
    assert [group.peak for group in scheduler._groups] == [0.02, 0.02, 3e-4, 3e-4]
    assert sum(p.requires_grad for p in module.parameters()) == 13
    assert sum(len(g["params"]) for g in configured["optimizer"].param_groups) == 13
    again = DPOModule(module.hparams["model"], loss="orpo")
    assert again._settings == module._settings


@pytest.mark.parametrize("name, rates", [
    ("linear", [1.0, 0.75, 0.5, 0.25]), ("cosine", [1.0, 0.8536, 0.5, 0.1464]),
    ("wsd", [1.0, 1.0, 1.0, 1.0]),
])  # fmt: skip
def test_a_named_schedule_follows_the_steps_of_the_fit(name: str, rates: list[float]) -> None:
    module = _module(lr_schedule=name, warmup_steps=0.2)
    assert module.lr_schedule is None  # before the fit
    schedule = module._lengths.of_fit(20)
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps) == (4, 20)
    assert [schedule.lr(n, 1.0, 0.0, 0.0) for n in (2, 20)] == [0.5, pytest.approx(0, abs=1e-9)]
    found = [schedule.lr(n, 1.0, 0.0, 0.0) for n in (4, 8, 12, 16)]
    assert found == pytest.approx(rates, abs=1e-4)
    assert schedule.wsd_decay_steps == (2 if name == "wsd" else None)


def test_weights_are_loaded_without_a_look_at_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of somebody else's names code; training with it would begin by an import."""
    (tmp_path / "lying.py").write_text("open('ran', 'w').close()\nclass Opt: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = _module(optimizer={"class_path": "lying.Opt", "lr": 0.5}, freeze=["embedding"])
    module.configure_model()
    state = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    state["pytorch-lightning_version"] = pl.__version__
    torch.save(state, tmp_path / "x.ckpt")
    for options in ({}, {"optimizer": "SGD"}):
        loaded = GPTLightningModule.load_from_checkpoint(
            tmp_path / "x.ckpt", weights_only=True, **options
        )
        assert not loaded.model.embedding.word_embeddings.weight.requires_grad
        if options:
            assert type(loaded.configure_optimizers()) is torch.optim.SGD
        else:
            with pytest.raises(ConfigError, match=r"names lying\.Opt.*load_from_checkpoint"):
                loaded.configure_optimizers()
    assert not (tmp_path / "ran").exists()
