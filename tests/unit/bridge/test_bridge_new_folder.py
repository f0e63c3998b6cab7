"""``GPTModel`` trained from scratch as a Hugging Face folder, and folders as its checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.families import family_like
from megatron_lightning.bridge.family_rules.family import missing_fields
from megatron_lightning.cli import main
from megatron_lightning.config import DeltaNetConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.helpers.gpt_folders import (
    FOLDERS,
    LENGTH,
    VOCABULARY,
    make_folder,
    make_predicting_folder,
    tokens,
    with_softcapping,
)
from tests.helpers.layouts import tiny_config

ONE_OF_EACH = {family: name for name, (family, _) in reversed(FOLDERS.items())}


def _checkpoint(config: TransformerConfig, path: Path) -> GPTLightningModule:
    """Save a model with initial weights, drawn wide."""
    module = GPTLightningModule(replace(config, init_method_std=0.2))
    module.configure_model()
    fit = trainer("auto", max_epochs=1)
    fit.strategy.connect(module)
    fit.save_checkpoint(path)
    return module.eval()


def _tokenizer(path: Path, size: int = VOCABULARY, template: str | None = None) -> Path:
    special = ["<s>", "</s>", "<|im_end|>"]
    words = special + [f"word{index}" for index in range(size - len(special))]
    words[-10:] = list("0123456789")
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    plain.pre_tokenizer = WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<|im_end|>"],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(path)
    return path


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_model_from_scratch_becomes_a_folder(tmp_path: Path, name: str) -> None:
    folder = make_folder(name, tmp_path)
    config = AutoBridge.from_hf_pretrained(folder).to_config()
    module = _checkpoint(config, tmp_path / "c.ckpt")
    family = AutoBridge.from_hf_pretrained(folder).family
    target = str(tmp_path / "out")
    commands.export(str(tmp_path / "c.ckpt"), target, family=family.__name__.lower())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    assert type(loaded).__name__ == family.architecture
    with_softcapping(loaded)
    expected = module(tokens(2, LENGTH))
    assert expected.std() > 0.5
    difference = (loaded(tokens(2, LENGTH)).logits - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()  # fp32, sums in another order
    assert missing_fields(family_like(config), config) == []
    again = AutoBridge.from_hf_pretrained(target)
    for key, value in module.model.state_dict().items():
        assert torch.equal(again.to_model("gpt").state_dict()[key], value), key


def test_heads_of_multi_token_prediction_are_written(tmp_path: Path) -> None:
    path = make_predicting_folder(tmp_path)
    config = AutoBridge.from_hf_pretrained(path).to_config()
    module = _checkpoint(config, tmp_path / "c.ckpt")
    commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    names = AutoBridge.from_hf_pretrained(tmp_path / "out").folder.tensors.keys()
    assert names == AutoBridge.from_hf_pretrained(path).folder.tensors.keys()
    again = AutoBridge.from_hf_pretrained(tmp_path / "out").to_model("gpt").state_dict()
    for key, value in module.model.state_dict().items():
        assert torch.equal(again[key], value), key


def test_tokenizer_dtype_and_both_forms_of_rotary_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoBridge.from_hf_pretrained(make_folder("llama", tmp_path)).to_config()
    _checkpoint(config, tmp_path / "c.ckpt")
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    words = _tokenizer(tmp_path / "words", template=template)
    out = tmp_path / "out"
    options = [f"--tokenizer={words}", "--dtype=bfloat16"]
    main(["convert", "export", str(tmp_path / "c.ckpt"), str(out), *options])
    assert f"{out} holds 21 tensors in 1 files." in capsys.readouterr().out
    plain = json.loads((out / "config.json").read_text())
    assert plain["dtype"] == plain["torch_dtype"] == "bfloat16"
    assert plain["rope_theta"] == 500.0 == plain["rope_parameters"]["rope_theta"]
    assert plain["rope_scaling"]["rope_type"] == "llama3"
    assert (plain["bos_token_id"], plain["eos_token_id"]) == (0, 1)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    assert (out / "tokenizer.json").read_bytes() == (words / "tokenizer.json").read_bytes()
    assert "`LlamaForCausalLM`" in (out / "README.md").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"has 80 entries, and vocab_size is 67"):
        large = _tokenizer(tmp_path / "large", 80)
        commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "x"), tokenizer=str(large))
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="is no tokenizer that transformers reads"):
        none = str(tmp_path / "none")
        commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "x"), tokenizer=none)


def test_a_model_that_no_family_describes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoBridge.from_hf_pretrained(make_folder("qwen3", tmp_path)).to_config()
    _checkpoint(config, tmp_path / "c.ckpt")
    with pytest.raises(ConfigError, match=r"the family llama does not.*it lacks qk_layernorm"):
        commands.export(str(tmp_path / "c.ckpt"), str(tmp_path / "out"), family="llama")
    _checkpoint(replace(config, activation="gelu"), tmp_path / "d.ckpt")
    with pytest.raises(SystemExit) as exit_:
        main(["convert", "export", str(tmp_path / "d.ckpt"), str(tmp_path / "out")])
    assert exit_.value.code == 2
    assert "The nearest one, qwen3, lacks activation" in capsys.readouterr().err
    sizes = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6)
    for options, text in (
        ({}, "The nearest one, llama, lacks linear_attention_freq, delta_net.num_key_heads"),
        ({"linear_attention_freq": None, "layer_pattern": "G*"}, "The nearest one, .* lacks "),
    ):
        with pytest.raises(ConfigError, match=text):
            family_like(
                tiny_config(
                    **{"linear_attention_freq": 2} | options, vocab_size=67, delta_net=sizes
                )
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["qwen2", "qwen2-moe", "kimi-k2"])
def test_a_folder_becomes_a_checkpoint_and_comes_back(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, checkpoint = make_folder(name, tmp_path), tmp_path / "c.ckpt"
    main(["convert", "import", str(folder), str(checkpoint), "--to", "gpt"])
    assert f"{checkpoint} holds" in capsys.readouterr().out
    main(["convert", "verify", str(folder), "--to", "gpt"])
    assert "tensors come back equal, and logits differ by" in capsys.readouterr().out
    if name == "qwen2":
        main(["convert", "verify", str(folder), "--to", "gpt", "--json"])
        verified = json.loads(capsys.readouterr().out)
        assert (verified["differing"], verified["errors"]) == ([], [])
        assert verified["logits_difference"] < 1e-5 and verified["num_tensors"] > 0
    main(["convert", "export", str(checkpoint), str(tmp_path / "out")])
    capsys.readouterr()
    main(["convert", "compare", str(folder), str(tmp_path / "out"), "--json"])
    compared = json.loads(capsys.readouterr().out)
    assert compared.pop("num_equal") > 0 and not any(compared.values())
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files
    untouched, ours = (
        HuggingFaceModule(str(folder)),
        GPTLightningModule(init_from_hf=str(checkpoint)),
    )
    loaded: Any = GPTLightningModule.load_from_checkpoint(checkpoint)
    for module in (untouched, ours):
        module.configure_model()
    expected = untouched.eval()(tokens(2, LENGTH))
    for module in (ours, loaded):
        torch.testing.assert_close(module.eval()(tokens(2, LENGTH)), expected, rtol=1e-5, atol=5e-5)
    main(
        ["convert", "import", str(folder), str(tmp_path / "b.ckpt"), "--to=gpt", "--dtype=bfloat16"]
    )
    rounded = GPTLightningModule(init_from_hf=str(tmp_path / "b.ckpt"))
    rounded.configure_model()
    for key, value in rounded.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[key].bfloat16().to(value.dtype)), key
