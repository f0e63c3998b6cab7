"""Trainings that fix the scales of rounded inputs in their first steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.precision import QAT
from megatron_lightning.precision.served.inputs import rounded_inputs
from megatron_lightning.precision.served.qat import qat_of, read_qat
from megatron_lightning.precision.served.values import ServedFormat
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.gpt_folders import make_folder
from tests.helpers.layouts import Layout, make_layout, token_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*has weights in")

SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
FIXED = QAT("nvfp4", activations="nvfp4", fake_quant_after_n_steps=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("llama"), **SIZES)


def _rows(count: int = 8) -> DataLoader[Any]:
    return DataLoader(token_rows(count, 16, 67), batch_size=4)


def _amax(module: Any) -> dict[str, float]:
    scales = qat_of(module)["model"].rounding.inputs  # type: ignore[union-attr]
    assert scales is not None
    return scales.amax


@pytest.mark.parametrize("strategy", [None, "megatron"])
def test_the_first_steps_find_scales_that_stay(
    source: Path, strategy: str | None, tmp_path: Path
) -> None:
    """The steps before are those of a plain training, and later inputs change no scale. A
    checkpoint saved after the fit has the inputs of the last step."""
    results, amax = [], []
    for steps, qat in ((2, None), (2, FIXED), (4, FIXED)):
        torch.manual_seed(0)
        module = HuggingFaceModule(str(source), qat=qat, learning_rate=1e-2)
        chosen = MegatronStrategy(micro_batch_size=2) if strategy else "auto"
        run = trainer(chosen, max_steps=steps)
        run.fit(module, _rows(16))
        results.append(module.model.model.layers[0].mlp.up_proj.weight.detach().clone())
        if qat is not None:
            run.save_checkpoint(path := tmp_path / f"{steps}.ckpt")
            amax.append(dict(read_qat(open_checkpoint(path).state())["model"].input_amax))
            assert amax[-1] == _amax(module)
            assert not qat_of(module)["model"].rounding.inputs.is_shared  # type: ignore[union-attr]
    assert torch.equal(results[0], results[1])
    assert len(amax[1]) == 14
    assert amax[0] == amax[1]
    attention = "model.layers.0.self_attn"
    assert len({amax[1][f"{attention}.{n}_proj"] for n in "qkv"}) == 1


def test_a_folder_is_the_trained_forward(source: Path, tmp_path: Path) -> None:
    checkpoint, served = tmp_path / "run.ckpt", tmp_path / "served"
    module = GPTLightningModule(init_from_hf=str(source), qat=FIXED, learning_rate=1e-2)
    also = CheckpointOptions(also_save_hf="every")
    run = trainer(MegatronStrategy(checkpoint_options=also), max_steps=4)
    run.fit(module, _rows(16))
    (metrics,) = run.validate(module, _rows(), verbose=False)
    run.save_checkpoint(checkpoint)
    record = read_qat(open_checkpoint(checkpoint).state())["model"]
    assert record.input_amax == _amax(module)
    commands.export(str(checkpoint), str(served))
    stored = load_file(served / "model.safetensors")
    beside = load_file(checkpoint / "hugging_face" / "model.safetensors")
    assert {*beside} == {*stored}
    assert all(torch.equal(x, beside[name]) for name, x in stored.items())
    _check_options(checkpoint, stored, tmp_path)
    with pytest.warns(UserWarning, match="scales of inputs, keys and values are left out"):
        model: Any = AutoBridge.from_hf_pretrained(served).to_model(dtype=torch.float32)
    form = ServedFormat.of("nvfp4")
    for path, layer in model.named_modules():
        if f"{path}.input_global_scale" in stored:
            # With the scale of the folder, at the largest input that it can hold.
            amax = (2688.0 / stored[f"{path}.input_global_scale"]).reshape(1, 1)
            layer.register_forward_pre_hook(
                lambda _, args, amax=amax: (rounded_inputs(args[0], form, amax),)
            )
    losses = []
    with torch.no_grad():
        for batch in _rows():
            logits = model(batch["tokens"]).logits
            losses.append(
                nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            )
    assert float(torch.stack(losses).mean()) == pytest.approx(metrics["val_loss"], rel=1e-5)
    # Text and scores from the checkpoint have rounded inputs as well.
    prompt, want = [1, 5, 9, 13], [21, 30]
    (score,) = Engine.load(str(checkpoint)).score([prompt], [want])
    with torch.no_grad():
        rows = model(torch.tensor([prompt + want[:-1]])).logits[0, -2:].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(rows, want, strict=True)]
    assert score.logprobs == pytest.approx(expected, abs=1e-4)


def _check_options(checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Scales of a cache come beside the training's, and nothing replaces or drops those."""
    export: Any = partial(commands.export, str(checkpoint), str(tmp_path / "cached"))
    for asked in ({"kv_cache": "fp8"}, {"kv_cache": "fp8", "quantize": "nvfp4"}):
        with pytest.raises(ConfigError, match=r"kv_cache fp8: .*LayerStatistics"):
            export(**asked)
    for asked in ({"scales": "mse"}, {"scales": "4over6", "quantize": "nvfp4"}):
        with pytest.raises(ConfigError, match=r"was trained with qat=nvfp4, activations=nvfp4"):
            export(**asked)
    with pytest.raises(ConfigError, match=r"that no training fixed.*none of them is set"):
        export(statistics="file")
    places = [f"decoder.layers.{n}.self_attention" for n in range(2)]
    entries = {f"{x}.{kind}/amax": torch.tensor(2.0) for x in places for kind in ("keys", "values")}
    Statistics(entries, tmp_path / "file").save(tmp_path / "file")
    export(kv_cache="fp8", statistics=str(tmp_path / "file"))
    cached = load_file(tmp_path / "cached" / "model.safetensors")
    assert {*cached} - {*stored} == {
        f"model.layers.{n}.self_attn.{kind}_scale" for n in range(2) for kind in "kv"
    }
    assert all(torch.equal(x, cached[name]) for name, x in stored.items())


def test_stacks_that_no_server_loads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    source = make_folder("granite-moe", tmp_path, **sizes)
    module = GPTLightningModule(init_from_hf=str(source), qat="nvfp4")
    run = trainer(MegatronStrategy(), max_steps=1)
    run.fit(module, _rows())
    run.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ConfigError, match=r"input_linear.weight of shape .* with 4 such stacks"):
        commands.export(str(tmp_path / "run.ckpt"), str(tmp_path / "out"))
    commands.export(str(source), str(tmp_path / "out"), quantize="nvfp4")
    assert "Experts stay stacked, as they are: model.layers.0.block" in capsys.readouterr().out


def test_notes_without_a_backward_wait_for_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of a step that is skipped. Without a strategy, several ranks are refused."""
    model = nn.Sequential(nn.Linear(32, 32))
    FIXED.apply(model)
    inputs = qat_of(model)[""].rounding.inputs  # type: ignore[union-attr]
    assert inputs is not None
    inputs.is_shared = True
    QAT.follow(model, 0)
    model(torch.full((4, 32), 3.0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    QAT.follow(model, 1)
    assert not inputs.amax
    inputs.is_shared = False
    with pytest.raises(ConfigError, match="which only MegatronStrategy shares"):
        QAT.follow(model, 1)


class _Skipped(GPTLightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert qat_of(self)["model"].rounding.inputs.is_shared  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 0 else loss


def test_a_skipped_step_is_one_of_those_that_find_scales(source: Path) -> None:
    module = _Skipped(init_from_hf=str(source), qat=FIXED)
    trainer(MegatronStrategy(), max_steps=3).fit(module, _rows(16))
    assert len(_amax(module)) == 8


def test_a_resume_goes_on_with_its_scales(source: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    first = HuggingFaceModule(str(source), qat=FIXED, learning_rate=1e-2)
    run = trainer(MegatronStrategy(), max_steps=3)
    run.fit(first, _rows(16))
    run.save_checkpoint(path)
    again = HuggingFaceModule(str(source), qat=FIXED, learning_rate=1e-2)
    trainer(MegatronStrategy(), max_steps=4).fit(again, _rows(16), ckpt_path=path)
    assert _amax(again) == _amax(first)
    plain = HuggingFaceModule(str(source), learning_rate=1e-2)
    run = trainer(MegatronStrategy(), max_steps=3)
    run.fit(plain, _rows(16))
    run.save_checkpoint(path)
    late = HuggingFaceModule(str(source), qat=FIXED, learning_rate=1e-2)
    with pytest.raises(ConfigError, match=r"no scale at step 3 .*fake_quant_after_n_steps.* above"):
        trainer(MegatronStrategy(), max_steps=4).fit(late, _rows(16), ckpt_path=path)


def _find(layout: Layout, folder: str, path: str) -> None:
    torch.manual_seed(0)
    module = GPTLightningModule(init_from_hf=folder, qat=FIXED, learning_rate=1e-3)
    data = DataLoader(token_rows(24, 16, 67), batch_size=8 // layout.data)
    run = trainer(layout.strategy(), max_steps=3)
    run.fit(module, data)
    run.save_checkpoint(path)


LONG = [make_layout("tp2-pp2", 4, tp=2, pp=2), make_layout("cp2", 2, cp=2)]


@pytest.mark.parametrize(
    "layout",
    [make_layout("pp2", 2, pp=2), *(pytest.param(x, marks=pytest.mark.slow) for x in LONG)],
    ids=lambda layout: layout.name,
)
def test_ranks_have_the_scales_of_one_process(layout: Layout, tmp_path: Path) -> None:
    folder = make_folder("qwen3-moe", tmp_path, **SIZES)
    paths = [str(tmp_path / name) for name in ("one", "ranks")]
    _find(make_layout("one", 1), str(folder), paths[0])
    run_ranks(layout.ranks, _find, layout, str(folder), paths[1])
    found = [read_qat(open_checkpoint(path).state())["model"].input_amax for path in paths]
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 4 + 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_without_steps_there_are_no_scales(source: Path) -> None:
    with pytest.raises(ConfigError, match="activations=nvfp4 has scales that the first steps find"):
        QAT("nvfp4", activations="nvfp4")
    with pytest.raises(ConfigError, match="of which servers have no kernel"):
        QAT("int4", activations="int4")  # type: ignore[arg-type]
    module = HuggingFaceModule(str(source), qat=FIXED)
    (before,) = trainer(MegatronStrategy()).validate(module, _rows(), verbose=False)
    assert before["val_loss"] > 0
