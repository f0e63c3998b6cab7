"""The fast backend of preprocess: the same bytes, compared while it runs, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data import load_tokenizer
from megatron_lightning.data.text import fast_backend
from megatron_lightning.data.text.encoding import _CHUNK_BYTES
from megatron_lightning.data.text.fast_backend import GigatokenTokenizer
from megatron_lightning.data.text.preprocess import preprocess
from megatron_lightning.errors import ConfigError, DataError
from tests.unit.data.test_tokenizer_kinds import json_folder

NUM_LINES = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gigatoken")
    return json_folder(tmp_path_factory.mktemp("fast") / "tokens")


@pytest.fixture(scope="module")
def lines(folder: Path) -> Path:
    texts = [f"{i} naïve ☕ <|end|> x{i * i} 😀 " * (i % 40 + 1) for i in range(NUM_LINES)]
    path = folder.parent / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert path.stat().st_size > 3 * _CHUNK_BYTES
    return path


def written(prefix: str, **options: Any) -> list[bytes]:
    preprocess(prefix, append_eod=True, **options)
    suffixes = (".bin", ".idx", ".json")
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in suffixes]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huggingface", "json"])
def test_the_same_bytes(kind: Any, folder: Path, lines: Path, tmp_path: Path) -> None:
    model: dict[str, Any] = {"tokenizer_type": kind, "tokenizer_model": str(folder)}
    expected = written(f"{tmp_path}/a", input=str(lines), **model)
    for workers in (1, 2):
        prefix = f"{tmp_path}/{workers}"
        fast = {"workers": workers, "tokenizer_backend": "gigatoken"}
        assert written(prefix, input=str(lines), **model, **fast) == expected


def test_a_difference_stops_the_run_and_names_the_document(
    folder: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong text is in a later chunk of a later piece, in a batch that is compared."""
    right = GigatokenTokenizer._encoded

    def wrong(self: GigatokenTokenizer, texts: Any) -> list[list[int]]:
        return [
            [*ids[:-1], 7] if text.startswith("777 ") else ids
            for text, ids in zip(texts, right(self, texts), strict=True)
        ]

    monkeypatch.setattr(GigatokenTokenizer, "_encoded", wrong)
    monkeypatch.setattr(fast_backend, "_COMPARED", 1)
    with pytest.raises(
        DataError, match=r"text\.jsonl:778: gigatoken makes \d+ ids.*again"
    ) as error:
        written(
            f"{tmp_path}/a",
            input=str(lines),
            tokenizer_type="json",
            tokenizer_model=str(folder),
            tokenizer_backend="gigatoken",
        )
    assert "[7] for [" in str(error.value)
    assert not list(tmp_path.glob("*.bin"))


def test_batches_are_compared_again_and_the_cache_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_tokenizer(folder, "json")
    monkeypatch.setattr(fast_backend, "_RENEWED", 1000)
    tokenizer = GigatokenTokenizer(reference)
    compared, made = [], []
    compare, make = tokenizer._compare, tokenizer._make
    monkeypatch.setattr(tokenizer, "_compare", lambda *a: (compared.append(a), compare(*a)))
    monkeypatch.setattr(tokenizer, "_make", lambda: (made.append(1), make())[1])
    for _ in range(129):
        assert tokenizer.encode_batch(["def f"]) == [reference.encode("def f")]
    assert len(compared) == 3 and not made  # batches 0, 64 and 128
    tokenizer.encode_batch(["x" * 1000])
    tokenizer.encode_batch(["def f"])
    assert len(compared) == 4 and made == [1]


def test_tokenizers_without_a_backend_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_type is sentencepiece\. Set it to hugging"):
        preprocess(f"{tmp_path}/a", vocab_size=300, tokenizer_backend="gigatoken")
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["byte_fallback"], rules["pre_tokenizer"], rules["decoder"] = True, None, None
    size = len(rules["model"]["vocab"])
    rules["model"]["vocab"].update({f"<0x{i:02X}>": size + i for i in range(256)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ConfigError, match="falls back to bytes"):
        GigatokenTokenizer(load_tokenizer(tmp_path, "json"))
    monkeypatch.setattr(GigatokenTokenizer, "_encoded", lambda self, texts: [[1]] * len(texts))
    with pytest.raises(ConfigError, match="of '', gigatoken makes 1 ids, the tokenizer 0"):
        GigatokenTokenizer(load_tokenizer(folder, "json"))


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    with pytest.raises(ConfigError, match="needs the package gigatoken"):
        GigatokenTokenizer(load_tokenizer(folder, "json"))
