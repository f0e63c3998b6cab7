"""Checkpoints of adapters alone: to other layouts, into folders of ``peft``, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from transformers import LlamaForCausalLM

from megatron_lightning.checkpoint import consolidate, open_checkpoint
from megatron_lightning.cli import main
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.errors import CheckpointError
from megatron_lightning.inference import Engine
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA, load_adapters
from megatron_lightning.peft.folder import read_folder
from megatron_lightning.peft.record import read_records
from megatron_lightning.peft.resume import check_scales
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import BATCH, CONFIG, TEXT, llama
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
TP, PP, MICRO = "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"
ONLY = {"checkpoint_options": CheckpointOptions(adapters_only=True)}


def _fit(
    folder: str,
    options: dict[str, Any] | None,
    steps: int,
    load: str | None = None,
    save: str | None = None,
    kind: str = "folder",
    data: int = 1,
    precision: str = "32-true",
) -> tuple[list[float], list[float]]:
    of_module: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "peft": LoRA(r=4)}
    if kind == "few":
        of_module["peft"] = LoRA(target_modules=["linear_qkv"])
    if kind == "gpt-folder":
        module: Any = GPTLightningModule(init_from_hf=f"{folder}/base", **of_module)
    elif kind in ("gpt", "few"):
        module = GPTLightningModule(CONFIG, **of_module)
    else:
        module = HuggingFaceModule(f"{folder}/base", **of_module)
    loader = DataLoader(ROWS, batch_size=BATCH // data)
    run = fit(options, module, loader, steps=steps, ckpt_path=load, precision=precision)
    if save is not None:
        run.trainer.save_checkpoint(save)
    return run.losses, run.norms


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    llama().save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    """Two steps under TP 2, adapters alone."""
    path = base / "adapters.ckpt"
    options = {TP: 2, MICRO: 2, **ONLY}
    run_ranks(2, _fit, str(base), options, 2, None, str(path), timeout_s=110)
    return path


def test_another_layout_continues_from_adapters_alone(base: Path, trained: Path) -> None:
    tensors = open_checkpoint(trained).tensors()
    assert {name for name in tensors if name.startswith("state_dict.")} == {
        name for name in tensors if name.startswith("state_dict.") and ".adapters." in name
    }
    assert any(name.startswith("optimizer_states") for name in tensors)
    [(losses, norms)] = run_ranks(1, _fit, str(base), None, 4)
    for own, own_norms in run_ranks(
        2, _fit, str(base), {"data_parallel": "fsdp"}, 4, str(trained), None, "folder", 2
    ):
        assert len(own) == 2
        assert own_norms == pytest.approx(norms[2:], rel=1e-5)
    for own, _ in run_ranks(1, _fit, str(base), {}, 4, str(trained)):
        # fp32, sums in another order, after two steps of AdamW.
        assert own == pytest.approx(losses[2:], rel=1e-6)


@pytest.mark.slow
def test_plain_lightning_loads_adapters_into_their_base(base: Path, trained: Path) -> None:
    """Plain Lightning begins with the first batch again."""
    consolidate(trained, base / "plain.ckpt")
    [(own, _)] = run_ranks(1, _fit, str(base), None, 3, str(base / "plain.ckpt"))
    logits = load_adapters(llama(), trained)(TEXT[:BATCH, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TEXT[:BATCH, 1:].flatten())
    assert own[0] == pytest.approx(float(loss), rel=1e-6)


def test_the_manifest_says_what_is_left_out(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["checkpoint", "inspect", str(trained)])
    printed = capsys.readouterr().out
    assert "left_out" in printed and "frozen weights of the base" in printed


def _error(*args: Any) -> str:
    try:
        _fit(*args)
    except Exception as error:
        return str(error)
    return ""


def test_another_base_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    other = llama()
    torch.nn.init.normal_(other.model.layers[1].mlp.up_proj.weight)
    other.save_pretrained(tmp_path / "base")
    consolidate(trained, tmp_path / "plain.ckpt")
    for options, load in ((None, tmp_path / "plain.ckpt"), ({}, trained)):
        [error] = run_ranks(1, _error, str(tmp_path), options, 4, str(load))
        assert "trained on other weights" in error


@pytest.mark.slow
def test_a_missing_adapter_is_an_error(base: Path) -> None:
    path = str(base / "few.ckpt")
    run_ranks(1, _fit, "", ONLY, 1, None, path, "few")
    [error] = run_ranks(1, _wider, path)
    assert "are missing from the checkpoint" in error and "linear_fc1.adapters.gate" in error


def _wider(load: str) -> str:
    fit = trainer(MegatronStrategy(), max_steps=4)
    module = GPTLightningModule(CONFIG, peft=LoRA())
    try:
        fit.fit(module, DataLoader(ROWS, batch_size=BATCH), ckpt_path=load)
    except Exception as error:
        return str(error)
    return ""


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TEXT[:2]).logits
    return found


def test_a_checkpoint_becomes_a_folder_of_peft_and_a_merged_model(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", "0.21")
    main(["adapters", "export", str(trained), str(tmp_path / "peft")])
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base / "base")
    stock = peft.PeftModel.from_pretrained(llama(), tmp_path / "peft")
    expected = _logits(stock)
    assert (expected - _logits(llama())).abs().max() > 1e-3
    for number, source in enumerate((trained, tmp_path / "peft")):
        target = tmp_path / f"merged-{number}"
        main(["adapters", "merge", str(source), str(target)])
        merged = LlamaForCausalLM.from_pretrained(target)
        unloaded = stock.merge_and_unload() if number else None
        # fp32: the sum of two products in one.
        torch.testing.assert_close(_logits(merged), expected, rtol=0, atol=2e-6)
        if unloaded is not None:
            for name, tensor in unloaded.state_dict().items():
                torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=0, atol=0)
    main(["adapters", "merge", str(trained), str(tmp_path / "bf16"), "--dtype", "bfloat16"])
    low = LlamaForCausalLM.from_pretrained(tmp_path / "bf16")
    for name, tensor in low.state_dict().items():  # rounded once
        assert torch.equal(tensor, merged.state_dict()[name].to(torch.bfloat16)), name


def test_a_merge_into_another_base_is_refused(trained: Path, tmp_path: Path) -> None:
    other = llama()
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "adapters",
                "merge",
                str(trained),
                str(tmp_path / "m"),
                "--base",
                str(tmp_path / "other"),
            ]
        )
    assert ended.value.code == 2
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_folder_of_peft_is_trained_further(base: Path, trained: Path, tmp_path: Path) -> None:
    main(["adapters", "export", str(trained), str(tmp_path / "peft")])
    main(["adapters", "import", str(tmp_path / "peft"), str(tmp_path / "again.ckpt")])
    main(["adapters", "export", str(tmp_path / "again.ckpt"), str(tmp_path / "peft2")])
    first, second = (read_folder(tmp_path / name) for name in ("peft", "peft2"))
    assert first.base == second.base and first.base.digest is not None
    for (name, tensor), (other, equal) in zip(first.state(), second.state(), strict=True):
        assert name == other and torch.equal(tensor, equal)
    [(own, _)] = run_ranks(2, _fit, str(base), {TP: 2}, 2, str(tmp_path / "again.ckpt"))[:1]
    [(expected, _)] = run_ranks(1, _fit, str(base), {}, 4, str(trained))
    assert len(own) == 2
    assert own[0] < 0.999 * run_ranks(1, _fit, str(base), {}, 1)[0][0][0]
    assert expected


@pytest.mark.slow
def _load(module: Any, checkpoint: Path, strategy: MegatronStrategy | str = "auto") -> None:
    loader = DataLoader(ROWS[:BATCH], batch_size=BATCH)
    trainer(strategy).validate(module, loader, ckpt_path=str(checkpoint), verbose=False)


SCALES: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"r": 4, "lora_alpha": 8}, "are multiplied by 2 .r=4, lora_alpha=8"),
    "rslora": ({"r": 4, "use_rslora": True}, "are multiplied by 8 .*use_rslora=True"),
    "rank": ({"r": 2}, "rank 2 and are multiplied by 8"),
    "ranks": ({"r": 4, "rank_pattern": {"up_proj": 2}}, "of model.layers.0.mlp.up_proj have"),
    "alphas": ({"r": 4, "alpha_pattern": {"up_proj": 2}}, "alpha_pattern={'up_proj': 2}"),
}


@pytest.mark.parametrize("case", SCALES)
def test_another_scale_of_the_same_weights_is_refused(base: Path, trained: Path, case: str) -> None:
    options, message = SCALES[case]
    with pytest.raises(CheckpointError, match=f"{message}.*as it was: r=4, lora_alpha=16"):
        module = HuggingFaceModule(f"{base}/base", peft=LoRA(**options))
        _load(module, trained, MegatronStrategy())


@pytest.mark.slow
def test_scales_are_compared_by_layer_and_in_plain_lightning(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    same = LoRA(r=8, lora_alpha=1, rank_pattern={r"\w+_proj": 4}, alpha_pattern={r"\w+_proj": 16})
    _load(HuggingFaceModule(f"{base}/base", peft=same), trained, MegatronStrategy())
    other = LoRA(r=4, lora_alpha=8)
    consolidate(trained, tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="Set peft as it was: r=4, lora_alpha=16"):
        _load(HuggingFaceModule(f"{base}/base", peft=other), tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="Set peft as it was: r=4, lora_alpha=16"):
        HuggingFaceModule.load_from_checkpoint(trained, path=f"{base}/base", peft=other)
    module = HuggingFaceModule(f"{base}/base", peft=LoRA(r=4, lora_dropout=0.1))
    _load(module, trained, MegatronStrategy())
    records = read_records(open_checkpoint(trained).state())
    with pytest.warns(UserWarning, match="with lora_dropout=0, and this run has 0.1"):
        check_scales(module, records, ())


@pytest.mark.slow
def test_scales_of_an_imported_folder_come_from_the_folder(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    """Also from a checkpoint of the further training, by the same configuration."""
    folder, checkpoint = tmp_path / "folder", tmp_path / "imported.ckpt"
    main(["adapters", "export", str(trained), str(folder)])
    main(["adapters", "import", str(folder), str(checkpoint), "--base", f"{base}/base"])
    own = LoRA(lora_dropout=0.05)  # of rank 8
    for start, steps in ((checkpoint, 1), (tmp_path / "1.ckpt", 2)):
        module = HuggingFaceModule(f"{base}/base", peft=own, learning_rate=1e-3)
        run = trainer(MegatronStrategy(**ONLY), max_steps=steps)
        run.fit(module, DataLoader(ROWS, batch_size=BATCH), ckpt_path=str(start))
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        assert (module.peft.r, module.peft.lora_alpha, module.peft.lora_dropout) == (4, 16, 0.05)
        state = open_checkpoint(tmp_path / f"{steps}.ckpt").state()
        assert state["hyper_parameters"]["peft"]["r"] == state["peft"]["model"]["lora"]["r"] == 4
    consolidate(checkpoint, tmp_path / "plain.ckpt")
    # A plain Trainer builds the model before it knows the checkpoint.
    with pytest.raises(CheckpointError, match="Set peft as it was: r=4, lora_alpha=16"):
        _load(HuggingFaceModule(f"{base}/base", peft=own), tmp_path / "plain.ckpt")


@pytest.mark.slow
def test_a_gpt_is_merged_into_a_checkpoint_without_adapters(tmp_path: Path) -> None:
    path = str(tmp_path / "gpt.ckpt")
    run_ranks(2, _fit, "", {TP: 2}, 2, None, path, "gpt")
    (tmp_path / "merged.ckpt").mkdir()
    with pytest.raises(SystemExit):
        main(["adapters", "merge", path, str(tmp_path / "merged.ckpt")])
    main(["adapters", "merge", path, str(tmp_path / "merged.ckpt"), "--overwrite"])
    adapted = GPTLightningModule.load_from_checkpoint(path)
    merged = GPTLightningModule.load_from_checkpoint(str(tmp_path / "merged.ckpt"))
    assert merged.peft is None
    with torch.no_grad():
        torch.testing.assert_close(
            merged(TEXT[:2]),
            adapted(TEXT[:2]),
            rtol=0,
            atol=5e-6,  # fp32, one product for two
        )


@pytest.mark.slow
@pytest.mark.parametrize("only", [False, True], ids=["full", "adapters"])
def test_a_gpt_of_a_folder_is_merged_into_a_folder(base: Path, tmp_path: Path, only: bool) -> None:
    """Parts of fused weights go back to the folder's own matrices."""
    peft = pytest.importorskip("peft", "0.21")
    path = str(tmp_path / "gpt.ckpt")
    options = {TP: 2, **(ONLY if only else {})}
    run_ranks(2, _fit, str(base), options, 2, None, path, "gpt-folder")
    main(["adapters", "merge", path, str(tmp_path / "merged")])
    main(["adapters", "export", path, str(tmp_path / "peft")])
    stock = peft.PeftModel.from_pretrained(llama(), tmp_path / "peft")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_logits(merged), _logits(stock), rtol=0, atol=2e-6)
    assert (_logits(merged) - _logits(llama())).abs().max() > 1e-3


class _Continued(HuggingFaceModule):
    """Loads a folder of adapters in ``configure_model``, where the base has no values yet."""

    adapters = ""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            load_adapters(self.model, self.adapters)


def _continue(folder: str, adapters: str) -> str | float:
    module, record = _Continued(f"{folder}/base", learning_rate=1e-2), Losses()
    module.adapters = adapters
    fit = trainer(MegatronStrategy(tensor_model_parallel_size=2), max_steps=1, callbacks=[record])
    try:
        fit.fit(module, DataLoader(ROWS, batch_size=BATCH))
    except CheckpointError as error:
        return str(error)
    return record.losses[0]


@pytest.mark.slow
def test_adapters_wait_for_their_base(base: Path, trained: Path, tmp_path: Path) -> None:
    main(["adapters", "export", str(trained), str(tmp_path / "peft")])
    logits = load_adapters(llama(), tmp_path / "peft")(TEXT[:BATCH, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TEXT[:BATCH, 1:].flatten())
    for found in run_ranks(2, _continue, str(base), str(tmp_path / "peft")):
        assert found == pytest.approx(float(loss), rel=1e-6)
    other = llama()
    torch.nn.init.normal_(other.model.layers[1].mlp.up_proj.weight)
    other.save_pretrained(tmp_path / "base")
    for found in run_ranks(2, _continue, str(tmp_path), str(tmp_path / "peft")):
        assert "trained on other weights" in str(found)


@pytest.mark.slow
def test_text_of_a_full_checkpoint_has_its_adapters(base: Path, tmp_path: Path) -> None:
    """They stand beside the base, in the checkpoint of an untouched model."""
    path = tmp_path / "full.ckpt"
    run_ranks(1, _fit, str(base), None, 2, None, str(path), timeout_s=110)
    plain = LlamaForCausalLM.from_pretrained(base / "base")
    adapted = load_adapters(LlamaForCausalLM.from_pretrained(base / "base"), path)
    tokens = TEXT[0].tolist()
    with torch.no_grad():
        before, after = (
            torch.log_softmax(model(TEXT[:1]).logits[0, :-1], dim=-1)
            .gather(1, TEXT[0, 1:, None])
            .sum()
            for model in (plain, adapted)
        )
    assert abs(float(before - after)) > 1e-2
    (score,) = Engine.load(path).score([tokens[:1]], [tokens[1:]])
    assert score.logprob == pytest.approx(float(after), rel=1e-5)  # fp32 in another order
