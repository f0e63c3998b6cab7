"""Folders of ``peft``: what is written, and what is refused when they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import CheckpointError, ConfigError, MissingCheckpointError
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.shards.digest import digest_of_shards, digest_of_tensors
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from megatron_lightning.peft import LoRA, load_adapters, save_adapters
from megatron_lightning.peft.folder import read_folder
from megatron_lightning.peft.saved import Base, adapters_of_module
from megatron_lightning.peft.texts import card, stops
from tests.helpers.chats import CHATML, make_tokenizer
from tests.unit.peft.test_lora import CONFIG, TOKENS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapters(LoRA(r=4).apply(GPTModel(CONFIG)), tmp_path / "adapter")
    return tmp_path / "adapter"


def _with(folder: Path, **values: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"bias": "all"},
        {"peft_type": "LOHA"},
        {"lora_bias": True},
        {"alora_invocation_tokens": [1, 2]},
        {"a_field_of_tomorrow": {"x": 1}},
    ],
)
def test_a_field_that_changes_the_computation_is_refused(
    folder: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        read_folder(_with(folder, **values))


def test_lengths_of_rows_belong_to_dora(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has use_dora=True, and .* no .*lora_magnitude_ve"):
        read_folder(_with(folder, use_dora=True))


def test_neutral_fields_are_no_matter(folder: Path) -> None:
    neutral = {
        "peft_version": "0.99",
        "lora_bias": False,
        "loftq_config": {},
        "layers_pattern": None,
    }
    assert read_folder(_with(folder, **neutral)).method.r == 4


def test_another_rank_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has rank 4"):
        read_folder(_with(folder, r=8))


def test_a_pickle_is_not_read(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(MissingCheckpointError, match="is a pickle"):
        read_folder(folder)


def test_a_damaged_file_is_an_error(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_folder(folder)


def test_a_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        save_adapters(LoRA().apply(GPTModel(CONFIG)), folder)


def test_parts_without_adapters_begin_at_zero(folder: Path, tmp_path: Path) -> None:
    """Many folders adapt queries and values alone."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = {n: t.normal_() for n, t in load_file(file).items() if "q_proj" in n or "v_proj" in n}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"10 layers of GPTModel .*0\.self_attn\.k_proj"):
        load_adapters(GPTModel(CONFIG), folder)
    _with(folder, target_modules=["q_proj", "v_proj"])
    model = load_adapters(GPTModel(CONFIG), folder)
    adapters = model.decoder.layers["0"].self_attention.linear_qkv.adapters
    assert not adapters.k.lora_B.weight.any() and adapters.q.lora_B.weight.any()
    assert not hasattr(model.decoder.layers["0"].mlp.linear_fc1, "adapters")


def test_values_wait_for_a_model_on_meta(folder: Path) -> None:
    from megatron_lightning.parallel.shards.materialize import materialize

    expected = load_adapters(GPTModel(CONFIG), folder)
    with torch.device("meta"):
        model = load_adapters(GPTModel(CONFIG), folder)
    materialize(model, "cpu")
    torch.testing.assert_close(model(TOKENS), expected(TOKENS), rtol=0, atol=0)


def test_a_digest_depends_on_values_and_places_alone() -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    total = digest_of_tensors([("w", tensor)])
    for dim, size in ((0, 2), (1, 5), (0, 3)):
        specs = [
            ShardSpec.split((6, 5), dim=dim, size=size, rank=rank, axis="tp")
            for rank in range(size)
        ]
        shards = [TensorShards("w", (6, 5), tensor.dtype, s.shards(s.shard(tensor))) for s in specs]
        assert (digest_of_shards(shards) - total) % 2**64 == 0
    assert digest_of_tensors([("w", tensor.bfloat16())]) == total  # the precision of a fit
    assert digest_of_tensors([("w", tensor.flip(0))]) != total
    assert digest_of_tensors([("v", tensor)]) != total


_OTHER = CHATML.replace("<|im_end|>", "<|stop|>")


@pytest.mark.parametrize(
    ("template", "before", "ends"),
    [
        (None, {"eos_token_id": 1}, [1, "<|im_end|>"]),
        (None, {}, [0, "<|im_end|>"]),
        (_OTHER, {"eos_token_id": [1, 2]}, [1, 2, "<|stop|>"]),
    ],
)
def test_an_export_stops_at_the_end_of_a_turn(
    tmp_path: Path, template: str | None, before: dict[str, Any], ends: list[Any]
) -> None:
    special = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|stop|>")
    tokenizer = make_tokenizer(special, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    files["generation_config.json"] = json.dumps(before).encode()
    added = stops(files, template)
    found = json.loads(added["generation_config.json"])["eos_token_id"]
    ids = [e if isinstance(e, int) else tokenizer.convert_tokens_to_ids(e) for e in ends]
    assert found == ids
    assert ("chat_template.jinja" in added) == (template is not None)
    assert stops(files | added, template).get("generation_config.json") is None


def test_without_a_tokenizer_nothing_is_said_of_stops() -> None:
    assert stops({"config.json": b"{}"}) == {}


def test_a_model_card_names_base_and_rank(tmp_path: Path) -> None:
    _, own = adapters_of_module(LoRA(r=4).apply(GPTModel(CONFIG)))
    own = replace(own, base=Base(origin="org/model"))
    text = card(own, "mine", merged=False)["README.md"].decode()
    assert "base_model: org/model" in text and "--max-lora-rank 4" in text
    assert "library_name: transformers" in card(own, "mine", merged=True)["README.md"].decode()
