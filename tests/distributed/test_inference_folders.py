"""Text of Hugging Face folders: that of stock transformers, by the engine for the families with
rules, else by the model's own generate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference import Engine, EngineOptions, Sampling, load_engine
from megatron_lightning.inference.commands.generate import generate
from megatron_lightning.inference.commands.load import check_model, find_model
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.parallel.grid.layout import ParallelLayout
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
import transformers

from tests.helpers.gpt_folders import FOLDERS, make_folder, make_model
from tests.helpers.layouts import tiny_config

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
PROMPTS = [[1, 2, 3], [7], list(range(1, 22)), [5, 4, 3, 2, 1, 0, 9]]
GREEDY = Sampling(max_new_tokens=20, temperature=0.0)


# Wide: a tiny model of two layers repeats one token otherwise.
WIDE = {"initializer_range": 0.4}


# With a cache of states, transformers 5.23 writes another text than its own full forwards.
CACHES_OTHERWISE = ("mamba2", "nemotron_h")


def folder_of(name: str, parent: Path) -> Path:
    return make_folder(name, parent, **WIDE)


def theirs_in(folder: Path, prompts: Any = PROMPTS) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return theirs(model.eval(), prompts)


def theirs(model: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            use_cache=model.config.model_type not in CACHES_OTHERWISE,
            pad_token_id=0,
            eos_token_id=-1,
        )[0].tolist()[len(prompt) :]
        for prompt in prompts
    ]


def texts_of(folders: list[Path], layout: dict[str, Any], kind: str = "Engine") -> Any:
    texts = []
    for folder in folders:
        options = EngineOptions(max_tokens=6, max_requests=3)  # chunks that end inside the window
        engine = load_engine(folder, ParallelLayout(**layout), options=options)
        assert type(engine).__name__ == kind
        texts.append([one.tokens for (one,) in engine.generate(PROMPTS, GREEDY)])
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_every_fourth_family(first: int, tmp_path: Path) -> None:
    folders = {name: folder_of(name, tmp_path) for name in [*FOLDERS][first::4]}
    expected = {name: theirs(make_model(name, **WIDE)) for name in folders}
    assert min(len({t for text in texts for t in text}) for texts in expected.values()) > 12
    found = dict(zip(folders, texts_of(list(folders.values()), {}), strict=True))
    assert {name for name in folders if found[name] != expected[name]} == set()


@pytest.mark.parametrize("layout", [{TP: 2}, pytest.param({PP: 2}, marks=pytest.mark.slow)])
def test_families_on_two_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    folders = [folder_of(name, tmp_path) for name in ("llama", "mistral", "qwen3")]
    expected = [theirs(make_model(name, **WIDE)) for name in ("llama", "mistral", "qwen3")]
    for found in run_ranks(2, texts_of, folders, layout):
        assert found == expected


def make_neox(folder: Path) -> None:
    """Write a model without rules."""
    torch.manual_seed(0)
    options = {"initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=67,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=48,
            **options,
        )
    )
    model.save_pretrained(folder)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_models_write_by_their_own_generate(size: int, tmp_path: Path) -> None:
    make_neox(tmp_path / "neox")
    expected = theirs_in(tmp_path / "neox")
    for found in run_ranks(size, texts_of, [tmp_path / "neox"], {TP: size}, "OwnGenerate"):
        assert found == [expected]
    engine: Any = load_engine(tmp_path / "neox")
    for score, text in zip(engine.score(PROMPTS, expected), expected, strict=True):
        assert score.is_greedy and len(score.logprobs) == len(text)
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM, which has no rules"):
        Engine.load(tmp_path / "neox")
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size=2.*GPTNeoX"):
        check_model(find_model(tmp_path / "neox"), ParallelLayout(**{PP: 2}), 2)


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A folder with a tokenizer, a chat template, and several tokens that end a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<s>", "</s>", "<end>", "user", "assistant", ":", *map(chr, range(97, 123))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=":"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "<s> {% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    folder = folder_of("llama", tmp_path)
    tokenizer.save_pretrained(folder)
    return folder


def test_text_to_text_by_the_folder_alone(spoken: Path) -> None:
    """BOS as the tokenizer adds it, once; all end tokens of the generation configuration."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(spoken)
    ids = [0, 6, 7]
    [[*new]] = theirs_in(spoken, [ids])
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20}
    model = ModelOptions(checkpoint=str(spoken), device="cpu")
    [text] = generate(model, "a b", **options)
    stops = [index for index, token in enumerate(new) if token == 1]
    new = new[: stops[0]] if stops else new
    assert text == tokenizer.decode([*ids, *new], skip_special_tokens=True)

    chat = [0, 3, 5, 6, 4, 5]
    [answer] = theirs_in(spoken, [chat])
    end = next(token for token in answer[2:] if answer.count(token) == 1)
    settings = json.loads((spoken / "generation_config.json").read_text())
    settings["eos_token_id"] = [1, end]
    (spoken / "generation_config.json").write_text(json.dumps(settings))
    [found] = generate(model, ["a"], chat=True, **options)
    first = min(answer.index(token) for token in (1, end) if token in answer)
    assert found == tokenizer.decode(answer[:first], skip_special_tokens=True)
    (spoken / "chat_template.jinja").unlink(missing_ok=True)
    (spoken / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ConfigError, match="no chat template"):
        generate(model, ["a"], chat=True, **options)


def test_adapters_of_a_checkpoint_are_part_of_the_model(tmp_path: Path) -> None:
    from dataclasses import asdict

    from megatron_lightning.config import LatentAttentionConfig
    from megatron_lightning.models import GPTModel
    from megatron_lightning.peft import LoRA
    from tests.distributed.test_inference_engine import SIZES, uncached

    latent = LatentAttentionConfig(
        q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    )
    for config in (
        tiny_config(**SIZES),
        tiny_config(**{**SIZES, "num_query_groups": None}, mla=latent),
    ):
        lora = LoRA(r=4)
        model = lora.apply(GPTModel(config)).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.4, generator=generator)
        path = tmp_path / "adapted.ckpt"
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        saved = {"config": asdict(config), "peft": asdict(lora)}
        torch.save({"state_dict": state, "hyper_parameters": saved}, path)
        expected = uncached(model, GREEDY, PROMPTS)
        found = Engine.load(path).generate(PROMPTS, GREEDY)
        assert [one.tokens for (one,) in found] == expected
        assert expected != uncached(GPTModel(config).eval(), GREEDY, PROMPTS)


def adapted_texts(checkpoint: Path, adapters: Path, layout: dict[str, Any]) -> Any:
    engine = load_engine(checkpoint, ParallelLayout(**layout), adapters=adapters)
    return [one.tokens for (one,) in engine.generate(PROMPTS, GREEDY)]


def adapted_in(folder: Path, adapters: Path, **options: Any) -> Any:
    """Return the model of a folder with filled adapters, and write the adapters to a folder."""
    from megatron_lightning.peft import LoRA, save_adapters

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    LoRA(r=4, **options).apply(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.4, generator=generator)
    save_adapters(model, adapters)
    return model


@pytest.mark.slow
def test_adapters_beside_their_model(tmp_path: Path) -> None:
    folder, adapters = folder_of("llama", tmp_path), tmp_path / "adapters"
    expected = theirs(adapted_in(folder, adapters))
    assert expected != theirs_in(folder)
    assert adapted_texts(folder, adapters, {}) == expected
    for found in run_ranks(2, adapted_texts, folder, adapters, {TP: 2}):
        assert found == expected


def test_adapters_beside_a_model_without_rules(tmp_path: Path) -> None:
    folder, adapters = tmp_path / "neox", tmp_path / "adapters"
    make_neox(folder)
    expected = theirs(adapted_in(folder, adapters))
    assert adapted_texts(folder, adapters, {}) == expected != theirs_in(folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        other.gpt_neox.final_layer_norm.weight.add_(1.0)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="the adapters were trained on other weights"):
        load_engine(tmp_path / "other", adapters=adapters)


def test_adapters_alone_and_twice_are_refused(tmp_path: Path) -> None:
    from dataclasses import asdict

    from megatron_lightning.models import GPTModel
    from megatron_lightning.peft import LoRA
    from tests.distributed.test_inference_engine import SIZES

    config, lora = tiny_config(**SIZES), LoRA(r=4)
    model = lora.apply(GPTModel(config))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {"config": asdict(config), "peft": asdict(lora)}
    record = {"lora": asdict(lora), "targets": ["linear_qkv"], "names": "gpt", "left_out": ["a"]}
    record |= {"fused": {}, "saved": [], "base": {}}
    checkpoint = {"state_dict": state, "hyper_parameters": saved}
    torch.save(checkpoint, tmp_path / "whole.ckpt")
    torch.save({**checkpoint, "peft": {"model": record}}, tmp_path / "alone.ckpt")
    with pytest.raises(
        CheckpointError, match=r"alone.ckpt holds adapters alone.*--checkpoint BASE"
    ):
        load_engine(tmp_path / "alone.ckpt")
    folder = folder_of("llama", tmp_path)
    adapted_in(folder, tmp_path / "adapters")
    adapted_in(folder, tmp_path / "saved", modules_to_save=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"values of embedding.*adapters merge"):
        load_engine(folder, adapters=tmp_path / "saved")
    with pytest.raises(ConfigError, match="the model has adapters of its own"):
        load_engine(tmp_path / "whole.ckpt", adapters=tmp_path / "adapters")
