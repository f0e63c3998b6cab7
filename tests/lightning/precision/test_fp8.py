"""MegatronFP8Precision in a Trainer: layouts that must not differ, resume, YAML, and what it leaves
behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import open_checkpoint, read_full
from megatron_lightning.config import MoEConfig, RecomputeOptions
from megatron_lightning.errors import CheckpointError, ConfigError, NonFiniteError
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.quantized_layers import RecipeLayers
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from megatron_lightning.strategies.checks.plugins import check_precision, check_recipe_of
from tests.helpers import hf_models
from tests.helpers.layouts import fit_losses, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_matrix import recipe_matrix
from tests.helpers.trainers import Losses, trainer

TP, PP, VPP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline"))
EP = "expert_model_parallel_size"
BATCH, SEQUENCE, VOCABULARY, STEPS = 8, 16, 40, 3
SCALINGS = ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
# Random bits come from streams of a rank, and differ between layouts.
RECIPES: dict[str, FP8Recipe] = {
    name: FP8Recipe(scaling=name, stochastic_rounding=False) for name in SCALINGS
}
RECOMPUTE = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


def _module(num_layers: int = 2, **options: Any) -> GPTLightningModule:
    pl.seed_everything(1)
    config = tiny_config(
        num_layers=num_layers,
        hidden_size=64,
        vocab_size=VOCABULARY,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **options,
    )
    return GPTLightningModule(config, learning_rate=3e-3)


def _data(batch_size: int, steps: int = STEPS) -> DataLoader[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (BATCH * steps, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    return DataLoader(rows, batch_size=batch_size)


def _fit(
    strategy: dict[str, Any],
    recipe: FP8Recipe | None,
    *,
    replicas: int = 1,
    module: dict[str, Any] | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    **options: Any,
) -> tuple[list[float], list[float]]:
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe is not None:
        precision = {"plugins": [MegatronFP8Precision(recipe, backend="emulation")]}
    steps = options.pop("steps", STEPS)
    ckpt_path = options.pop("ckpt_path", None)
    of_trainer = {"callbacks": callbacks, "ckpt_path": ckpt_path, **precision, **options}
    data = _data(BATCH // replicas)
    return fit_losses(strategy, _module(**(module or {})), data, steps=steps, **of_trainer)


ONE = {"micro_batch_size": 2}
# Replicas take every other sample: micro-batches of one are those of one process.
SINGLE = {"micro_batch_size": 1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp2": (2, {PP: 2}, {}),
    "vpp2": (2, {PP: 2, VPP: 2}, {"module": {"num_layers": 4}}),
    "zb-h1": (2, {PP: 2, "pipeline_schedule": "zb-h1"}, {}),
    "dp2": (2, SINGLE, {"replicas": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp", **SINGLE}, {"replicas": 2}),
    "sp2": (2, {TP: 2}, {}),
    "tp2-pp2": (4, {TP: 2, PP: 2}, {}),
    "recompute": (1, {"recompute": RECOMPUTE}, {}),
    "ep2": (
        2,
        {EP: 2, **SINGLE},
        {"replicas": 2, "module": {"moe": MoEConfig(num_experts=4)}},
    ),
}
FAST = [("current", "pp2"), ("mxfp8", "zb-h1"), ("delayed", "dp2")]


def _compared(strategy: dict[str, Any], scaling: str, options: dict[str, Any]) -> Any:
    return _fit({**ONE, **strategy}, RECIPES[scaling], **options)


# Ranks of experts compute rows of several ranks' micro-batches together, which then share scales;
# parts of a row-parallel sum are rounded to bf16, and a code that flips moves a value by 2^-4.
BANDS = {"ep2": 5e-2, "sp2": 5e-2, "tp2-pp2": 5e-2}


@pytest.mark.spread(1)
@recipe_matrix(SCALINGS, CASES, fast=FAST)
def test_layouts_equal_one_process(scaling: str, case: str) -> None:
    """1e-5 where no scale crosses ranks: sums of gradients come in another order. Norms are global;
    a loss is that of a replica's samples."""
    ranks, strategy, options = CASES[case]
    size = {**ONE, **strategy}["micro_batch_size"]
    same = {"module": options.get("module", {})}
    [(losses, norms)] = run_ranks(
        1, _compared, {"micro_batch_size": size}, scaling, same, timeout_s=100
    )
    limit = BANDS.get(case, 1e-5)
    for own, others in run_ranks(ranks, _compared, strategy, scaling, options, timeout_s=100):
        assert others == pytest.approx(norms, rel=limit)
        if options.get("replicas", 1) == 1:
            assert own == pytest.approx(losses, rel=limit)


# ------------------------------------------------------------------------ what it tracks, and keeps


@pytest.mark.parametrize(
    "scaling",
    [pytest.param(name, marks=[pytest.mark.slow]) for name in SCALINGS],
)
@pytest.mark.timeout(300)
def test_a_training_tracks_bf16(scaling: str) -> None:
    """On text that can be learnt, the mean loss of the last 50 of 200 steps is bf16's (0.44) within
    0.04 (at most 0.024 was seen), and each of the first ten losses within 0.15 (0.3 with 4 bits);
    some of those differ by more than 5e-3. So a quantizer that does nothing fails, whose sums are
    only rounded otherwise (1.3e-3), and so does one whose scales are twice too large (0.28 to 0.36,
    and 0.16 to 0.25 at the end)."""
    bf16, _ = _long(None)
    losses, _ = _long(FP8Recipe(scaling=scaling))  # type: ignore[arg-type]
    differences = [abs(a - b) for a, b in zip(losses[:10], bf16[:10], strict=True)]
    assert 5e-3 < max(differences) < (0.3 if scaling == "nvfp4" else 0.15)
    mean, expected = (sum(run[-50:]) / 50 for run in (losses, bf16))
    assert mean == pytest.approx(expected, abs=0.04)


def _long(recipe: FP8Recipe | None) -> tuple[list[float], list[float]]:
    return run_ranks(1, _train, recipe, timeout_s=200)[0]  # type: ignore[no-any-return]


def _train(recipe: FP8Recipe | None) -> tuple[list[float], list[float]]:
    """Train 200 steps on sequences x(t + 1) = (3 x(t) + step) mod 40 of 8 different steps."""
    start = torch.randint(0, VOCABULARY, (8 * 200,), generator=torch.Generator().manual_seed(5))
    tokens = [start]
    for _ in range(SEQUENCE):
        tokens.append((3 * tokens[-1] + torch.arange(8 * 200) % 8) % VOCABULARY)
    text = torch.stack(tokens, dim=1)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe is not None:
        precision = {"plugins": [MegatronFP8Precision(recipe)]}
    return fit_losses({}, _module(), DataLoader(rows, batch_size=8), steps=200, **precision)


def _resumed(scaling: str, folder: str, layout: dict[str, Any]) -> Any:
    recipe = FP8Recipe(scaling=scaling)  # type: ignore[arg-type]
    full, _ = _fit({**ONE, **layout}, recipe, steps=4)
    save = ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=2, save_top_k=1)
    options: dict[str, Any] = {"enable_checkpointing": True}
    _fit({**ONE, **layout}, recipe, steps=2, callbacks=(save,), **options)
    path = f"{folder}/at.ckpt"
    resumed, _ = _fit({**ONE, **layout}, recipe, steps=4, ckpt_path=path)
    bf16, _ = _fit({**ONE, **layout}, None, steps=4, ckpt_path=path)
    return full, resumed, bf16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "ranks", "layout"),
    [
        ("delayed", 2, {PP: 2}),
        ("nvfp4", 1, {}),
        ("delayed", 1, {}),
        ("nvfp4", 4, {PP: 2, TP: 2}),
    ],
)
def test_resume_is_bit_equal_and_goes_on_in_bf16(
    scaling: str, ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Histories of all pipeline stages and the stream of random bits are in the checkpoint."""
    for full, resumed, bf16 in run_ranks(
        ranks, _resumed, scaling, str(tmp_path), layout, timeout_s=110
    ):
        assert resumed[-2:] == full[-2:]
        assert bf16[-2:] == pytest.approx(full[-2:], rel=5e-2) and bf16[-2:] != full[-2:]


def _begun_in_bf16(folder: str) -> Any:
    save = ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=2, save_top_k=1)
    options: dict[str, Any] = {"callbacks": (save,), "enable_checkpointing": True}
    bf16, _ = _fit({**ONE, PP: 2}, None, steps=4)
    _fit({**ONE, PP: 2}, None, steps=2, **options)
    losses, _ = _fit({**ONE, PP: 2}, RECIPES["delayed"], steps=4, ckpt_path=f"{folder}/at.ckpt")
    return losses, bf16


@pytest.mark.slow
def test_a_training_in_bf16_goes_on_quantized(tmp_path: Path) -> None:
    """The histories are empty at first."""
    for losses, bf16 in run_ranks(2, _begun_in_bf16, str(tmp_path), timeout_s=110):
        assert losses[-2:] == pytest.approx(bf16[-2:], rel=5e-2) and losses[-2:] != bf16[-2:]


class _Overflow(pl.Callback):
    """Makes the second step's input of one layer infinite in one place."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                module.model.decoder.layers["0"].mlp.linear_fc1.weight[0, 0] = torch.inf


def _overflown(scaling: str) -> tuple[bool, str]:
    """Return whether the first loss is finite, and what stops the second step."""
    record = Losses()
    try:
        _fit({**ONE, "non_finite": "raise"}, RECIPES[scaling], callbacks=(_Overflow(), record))
    except NonFiniteError as error:
        return record.losses == [pytest.approx(4.0, abs=1.0)], str(error)
    return False, "nothing"


@pytest.mark.parametrize(
    "scaling",
    ["delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in SCALINGS[1:])],
)
def test_an_overflow_is_shown(scaling: str) -> None:
    """No scale hides an infinity behind the largest code."""
    [(was_finite, message)] = run_ranks(1, _overflown, scaling)
    assert was_finite and "micro-batch" in message


def _after(folder: str) -> Any:
    module = _module()
    recipe = FP8Recipe(scaling="delayed")
    plugin = MegatronFP8Precision(recipe)
    seen = list[int]()
    states = list[dict[str, Tensor]]()

    class Watch(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            states.append(plugin.state_dict()["amax_histories"])

        def on_validation_end(self, *_: Any) -> None:
            seen.append(len(next(iter(plugin.state_dict()["amax_histories"].values()))))

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            gemms = [m.gemm for m in pl_module.modules() if "gemm" in vars(m)]
            assert len(gemms) == 8 and all(isinstance(g, EmulatedGemm) for g in gemms)

    fit = trainer(
        MegatronStrategy(micro_batch_size=2),
        max_steps=2,
        callbacks=[Watch()],
        plugins=[plugin],
        val_check_interval=1,
        limit_val_batches=1,
    )
    fit.fit(module, _data(BATCH), _data(BATCH))
    left = [name for name, m in module.named_modules() if "gemm" in vars(m)]
    kinds = {type(m).__name__ for m in module.modules()}
    for name in ("fit", "validate"):
        fit.save_checkpoint(f"{folder}/{name}.ckpt")
        fit.validate(module, _data(BATCH), verbose=False)
        entry = read_full(f"{folder}/{name}.ckpt")["MegatronFP8Precision"]
        states.append(entry.get("amax_histories", {}))
        own = open_checkpoint(f"{folder}/{name}.ckpt").state()["megatron_lightning"]
        assert own["step_size"] == {"num_replicas": 1, "batch_size": BATCH, "accumulated": 1}
    return seen, left, "AdaptableLinear" in kinds, states


def test_evaluation_leaves_histories_and_a_run_leaves_the_module(tmp_path: Path) -> None:
    """4 micro-batches a step. Checkpoints saved after the fit have its histories and batch."""
    [(seen, left, quantized, (end, *saved))] = run_ranks(1, _after, str(tmp_path))
    assert seen[:2] == [4, 8] and not left and not quantized
    for state in saved:
        assert state.keys() == end.keys() and len(state) == 24
        assert all(torch.equal(entries, end[name]) for name, entries in state.items())


# ------------------------------------------------------------------------------- what a user writes


@pytest.mark.slow
def test_in_yaml_the_plugin_is_a_class_path(tmp_path: Path) -> None:
    """TP 2 x PP 2 of the demo's recipe, on text of its own."""
    text, plugin, prefix = tmp_path / "text.txt", tmp_path / "fp8.yaml", f"{tmp_path}/corpus"
    text.write_text("\n".join(f"def f{i}(x): return x + {i}" for i in range(4000)))
    plugin.write_text(YAML)
    config = Path(__file__).parents[3] / "configs/tiny_cpu.yaml"
    options = {
        "config": plugin, "data.data_prefix": f"{prefix}_text_document",
        "data.tokenizer_model": f"{prefix}_tokenizer.model", "data.num_train_samples": 32,
        "data.sequence_length": 32, "data.split": "100,0,0", "model.config.vocab_size": 300,
        "model.config.max_sequence_length": 32, "trainer.max_steps": 2,
        "trainer.limit_val_batches": 0, "trainer.logger": "false", "trainer.callbacks": "null",
    }  # fmt: skip
    _command(
        tmp_path, "preprocess", "--input", text, "--output-prefix", prefix, "--vocab-size", 300,
        "--append-eod",
    )  # fmt: skip
    pairs = [f"--{name}={value}" for name, value in options.items()]
    output = _command(tmp_path, "fit", "--config", config, *pairs)
    assert "quantized layers on this rank: 2 by mxfp8, 2 by blockwise" in output
    assert "`max_steps=2` reached" in output


def _command(folder: Path, *words: Any) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "megatron_lightning", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


YAML = """
trainer:
  plugins:
    - class_path: megatron_lightning.strategies.MegatronFP8Precision
      init_args:
        backend: emulation
        recipe:
          class_path: megatron_lightning.precision.FP8Recipe
          init_args:
            scaling: mxfp8
            num_layers_at_end_in_bf16: 1
            modules:
              "**.linear_proj": bf16
              "**.linear_fc2": {scaling: blockwise}
"""


class _TransformerEngine:
    precision = "transformer-engine"


def test_lightnings_transformer_engine_is_refused_on_several_ranks() -> None:
    plugin: Any = _TransformerEngine()
    with pytest.raises(ConfigError, match=r"4 ranks.*MegatronFP8Precision"):
        check_precision(plugin, 4)
    check_precision(plugin, 1)


@pytest.mark.parametrize("backend", ["native", "transformer_engine"])
def test_backends_that_are_missing_are_refused_before_the_trainer(backend: Any) -> None:
    with pytest.raises(ConfigError, match=f"backend is '{backend}'"):
        MegatronFP8Precision(FP8Recipe(), backend=backend)


UNFIT: dict[str, tuple[FP8Recipe, str]] = {
    "pattern": (FP8Recipe(modules={"**.linear_prj": "bf16"}), "match no module .*linear_prj"),
    "nothing": (FP8Recipe(modules={"**": "bf16"}), "quantizes no layer"),
    "layers": (FP8Recipe(num_layers_at_end_in_bf16=1), "has 2 lists of 4 layers: model.encoder"),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("case", "model"),
    [*(("pattern", model) for model in ("gpt", "llama")), ("nothing", "llama"), ("layers", "t5")],
)
def test_recipes_that_do_not_fit_a_model_are_refused_before_the_launch(
    case: str, model: str
) -> None:
    """Of ours, and of models whose layers are there when the module is constructed."""
    recipe, message = UNFIT[case]
    fit = trainer(
        MegatronStrategy(**{PP: 2}), devices=2, max_steps=1, plugins=[MegatronFP8Precision(recipe)]
    )
    module = _module() if model == "gpt" else hf_models.Untouched(model)
    with pytest.raises(ConfigError, match=message):
        fit.fit(module, _data(BATCH))
    assert not torch.distributed.is_initialized()


def test_layers_that_only_parallel_ones_replace_are_not_refused() -> None:
    """GPT-2's are no ``nn.Linear``, and can be quantized over tensor ranks only."""
    plugin, module = MegatronFP8Precision(), hf_models.Untouched("gpt2")
    check_recipe_of(plugin, module, ParallelLayout(tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match=r"quantizes no layer .*which cannot be quantized"):
        check_recipe_of(plugin, module, ParallelLayout())


def test_another_strategy_is_refused_instead_of_training_in_bf16() -> None:
    fit = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        plugins=[MegatronFP8Precision(RECIPES["current"])],
    )
    with pytest.raises(ConfigError, match=r"computes in bf16 here.* strategy=MegatronStrategy\(\)"):
        fit.fit(_module(), _data(BATCH))


def test_histories_of_another_recipe_are_refused() -> None:
    layers = RecipeLayers(RECIPES["delayed"], "emulation")
    layers.load_state_dict({"other.input": torch.ones(2)})
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)})
    context = ParallelContext(ParallelLayout())
    with pytest.raises(CheckpointError, match=r"histories of 1 tensors and none of layer.input"):
        layers.attach(model, context, caches_weights=True)
