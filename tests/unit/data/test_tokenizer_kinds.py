"""Tokenizers of every kind: the ids of their own packages, one protocol, and ways out of errors."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.data import ByteTokenizer, NullTokenizer, PlainTokenizer, load_tokenizer
from megatron_lightning.data.pretraining.fim import FillInTheMiddle
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.errors import ConfigError, DataError

TEXTS = ["def f(x): return x", "  naïve ☕ text\n", "", "word word"]
PATTERN = r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+"


class Letters(PlainTokenizer):
    """A tokenizer of a user."""

    vocab_size, eod = 128, 0

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def encode(self, text: str) -> list[int]:
        return [ord(letter) + self.shift for letter in text if ord(letter) < 100]

    def decode(self, ids: Any) -> str:
        return "".join(chr(i - self.shift) for i in ids)


def json_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS * 9, trainer)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return folder


def check_protocol(tokenizer: Any, texts: list[str] = TEXTS) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    assert 0 <= tokenizer.eod < tokenizer.vocab_size and tokenizer.identity
    assert all(token < tokenizer.vocab_size for text in texts for token in tokenizer.encode(text))


def test_tokenizer_json_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = json_folder(tmp_path / "tokens")
    ours, theirs = load_tokenizer(folder, "json"), load_tokenizer(folder, "huggingface")
    check_protocol(ours)
    check_protocol(theirs)
    assert [ours.encode(t) for t in TEXTS] == [theirs.encode(t) for t in TEXTS]
    assert ours.eod == theirs.eod == ours.token_id("<|end|>") == theirs.token_id("<|end|>")
    assert ours.token_id("nothing") is None and theirs.token_id("nothing") is None
    limited = json.loads((folder / "tokenizer.json").read_text())
    limited["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(limited))
    ours_again, theirs_again = load_tokenizer(folder, "json"), load_tokenizer(folder, "huggingface")
    for whole, again in ((ours, ours_again), (theirs, theirs_again)):
        assert again.identity == whole.identity
        check_protocol(again)
    del limited["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(limited))
    with pytest.raises(DataError, match=r"an entry is missing .*added_tokens.*save_pretrained"):
        load_tokenizer(folder, "huggingface")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no eos_token ends documents"):
        load_tokenizer(folder / "tokenizer.json", "json")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        load_tokenizer(tmp_path / "none.json", "json")


def test_sentencepiece_in_batches(tmp_path: Path) -> None:
    train_sentencepiece(TEXTS * 9, 300, tmp_path / "t.model")
    tokenizer = load_tokenizer(tmp_path / "t.model")
    check_protocol(tokenizer)
    assert tokenizer.token_id("</s>") == tokenizer.eod and tokenizer.token_id("nothing") is None


def test_bytes_and_ids_as_text() -> None:
    check_protocol(ByteTokenizer(["<fim_prefix>"]))
    assert load_tokenizer("", "bytes").encode("é") == [0xC3, 0xA9]
    assert ByteTokenizer(["<fim_prefix>"]).token_id("<fim_prefix>") == 258
    assert ByteTokenizer().identity != ByteTokenizer(["<fim_prefix>"]).identity
    check_protocol(NullTokenizer(100), ["1 2 99", ""])
    assert load_tokenizer("100", "null").eod == 100
    for wrong in ("word", "-1", "100"):
        with pytest.raises(DataError, match=f"'{wrong}' is no id from 0 to 99"):
            NullTokenizer(100).encode(f"1 {wrong}")
    with pytest.raises(ConfigError, match="is no number of ids"):
        load_tokenizer("many", "null")


def test_a_class_of_your_own(tmp_path: Path) -> None:
    here = f"{__name__}.Letters"
    assert load_tokenizer(here, "class_path").encode("a") == [97]
    (tmp_path / "t.yaml").write_text(f"class_path: {here}\ninit_args: {{shift: 1}}\n")
    assert load_tokenizer(tmp_path / "t.yaml", "class_path").encode("a") == [98]
    with pytest.raises(ConfigError, match="no tokenizer can be made of it"):
        load_tokenizer("none.Such", "class_path")
    with pytest.raises(ConfigError, match=r"no tokenizer can be made of it .*decode, encode"):
        load_tokenizer("megatron_lightning.data.PlainTokenizer", "class_path")
    with pytest.raises(ConfigError, match=r"Path has no vocab_size, eod.*PlainTokenizer"):
        load_tokenizer("pathlib.Path", "class_path")


def test_tiktoken_with_its_pattern(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from megatron_lightning.data import TiktokenTokenizer

    ranks = [bytes([i]) for i in range(256)] + [b"wo", b"rd", b"word"]
    lines = (f"{base64.b64encode(rank).decode()} {i}" for i, rank in enumerate(ranks))
    (tmp_path / "r.tiktoken").write_text("\n".join(lines))
    tokenizer = TiktokenTokenizer(str(tmp_path / "r.tiktoken"), pattern=PATTERN)
    check_protocol(tokenizer)
    assert tokenizer.encode("word word") == [258, 32, 258] and tokenizer.eod == 259
    other = TiktokenTokenizer(str(tmp_path / "r.tiktoken"), pattern=r"[\s\S]+")
    assert other.identity != tokenizer.identity
    special = {"<x>": 300}
    with pytest.raises(ConfigError, match="is none of the special tokens"):
        TiktokenTokenizer(str(tmp_path / "r.tiktoken"), pattern=PATTERN, special_tokens=special)
    for special, message in (
        ({"<|endoftext|>": 258}, r"\[258\] are ranks of"),
        ({"<|endoftext|>": 259, "<x>": 259}, "two tokens share an id.*from 259 on"),
    ):
        with pytest.raises(ConfigError, match=message):
            TiktokenTokenizer(str(tmp_path / "r.tiktoken"), pattern=PATTERN, special_tokens=special)


@pytest.mark.parametrize("kind", ["huggingface", "json"])
def test_fill_in_the_middle_leaves_special_tokens_out(kind: Any, tmp_path: Path) -> None:
    """As in Megatron: the text that is cut has no special token."""
    folder = json_folder(tmp_path / "tokens")
    rules = json.loads((folder / "tokenizer.json").read_text())
    names = [f"<fim_{name}>" for name in ("prefix", "middle", "suffix", "pad")] + ["<repository>"]
    for name in names:
        token = {
            "id": len(rules["model"]["vocab"]), "content": name, "special": True,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }  # fmt: skip
        rules["model"]["vocab"][name] = token["id"]
        rules["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "additional_special_tokens": names})
    )
    tokenizer: Any = load_tokenizer(folder, kind)
    fim = FillInTheMiddle(fim_rate=1.0, fim_spm_rate=0.0, tokenizer=tokenizer)
    found = fim(tokenizer.encode("abc<repository>def"), np.random.RandomState(0), 20).tolist()
    assert tokenizer.token_id("<repository>") not in found
    assert sorted(tokenizer.decode([i for i in found if i not in tokenizer.special_ids])) == [
        *"abcdef"
    ]


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "json", "bytes", "class_path"])
def test_a_checkpoint_keeps_the_tokenizer_of_its_data(kind: str, tmp_path: Path) -> None:
    from megatron_lightning.inference.commands.load import find_codec
    from megatron_lightning.modules import PretrainDataModule

    train_sentencepiece(TEXTS * 9, 300, tmp_path / "t.model")
    folder = json_folder(tmp_path / "tokens")
    own = f"{__name__}.Letters"
    model = {"sentencepiece": tmp_path / "t.model", "bytes": "", "class_path": own}
    name = str(model.get(kind, folder))
    data = PretrainDataModule(
        mock=True, sequence_length=4, batch_size=1, tokenizer_model=name, tokenizer_type=kind
    )
    state = {"state_dict": {}, "PretrainDataModule": data.state_dict()}
    torch.save(state, tmp_path / "x.ckpt")
    for path in (tmp_path / "t.model", folder / "tokenizer.json", folder / "tokenizer_config.json"):
        path.unlink()
    codec = find_codec(tmp_path / "x.ckpt")
    assert data.tokenizer is not None
    assert codec.ids("def f", special=False) == data.tokenizer.encode("def f")
    assert codec.stops == (data.tokenizer.eod,)
