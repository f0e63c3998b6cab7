"""Conversations with sounds as documents and rows."""

from __future__ import annotations

import base64
import struct
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from megatron_lightning.data.images.media import MEDIA, sound, sound_size
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import (
    AudioOptions,
    FinetuneDataModule,
    HuggingFaceModule,
    ImageOptions,
)
from megatron_lightning.optional import MissingPackageError
from tests.helpers.chats import write_rows
from tests.helpers.sound_folders import RATE, make_sound_folder, write_sound, write_sound_rows


@cache
def _folder() -> Path:
    return make_sound_folder(Path(mkdtemp(prefix="sounds-")))


def _data(rows: str, folder: Path, **options: Any) -> FinetuneDataModule:
    data = FinetuneDataModule(
        rows,
        sequence_length=256,
        batch_size=2,
        cache_dir=str(folder / "cache"),
        **{"audio": AudioOptions(), **options},
    )
    data.use_model(HuggingFaceModule(str(_folder())))
    data.prepare_data()
    data.setup("fit")
    return data


def test_ids_and_entries_are_those_of_the_processor(tmp_path: Path) -> None:
    data = _data(write_sound_rows(tmp_path, 6), tmp_path)
    processor: Any = data.processor._processor  # type: ignore[union-attr]
    rows = data.train_dataset()
    for number in range(6):
        row = rows[(number,)]
        sounds = [(tmp_path / f"{(number + n) % 3}.wav").read_bytes() for n in range(number % 3)]
        content = [{"type": "audio"}] * len(sounds) + [
            {"type": "text", "text": f"what is it {number}"}
        ]
        answer = "a red one " + "green " * (number % 4)
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
            tokenize=False,
        )
        heard = [sound("", one) for one in sounds]
        options = {"audio": heard, "sampling_rate": RATE} if heard else {}
        given = processor(text=[text], return_tensors="pt", **options)
        length = int((~row["padding"]).sum())
        assert row["tokens"][:length].tolist() == given["input_ids"][0].tolist()
        assert len(row["images"]["input_features"]) == len(sounds)
        if sounds:
            assert torch.equal(row["images"]["input_features"], given["input_features"])
        trained = row["labels"][row["labels"] != -100].tolist()
        assert processor.tokenizer.decode(trained) == f"{answer}<|im_end|>"


def test_parts_of_openai_columns_and_bytes_are_read(tmp_path: Path) -> None:
    name = write_sound(tmp_path / "a.wav", 0.4)
    data = (tmp_path / name).read_bytes()
    encoded = base64.b64encode(data).decode()
    parts: tuple[dict[str, Any], ...] = (
        {"type": "audio", "audio": name},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
    )
    answer = {"role": "assistant", "content": "green"}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [part]}, answer]} for part in parts
    ]
    rows.append({"messages": [{"role": "user", "content": "<audio>"}, answer], "audios": [name]})
    found = _data(write_rows(tmp_path / "rows.jsonl", rows), tmp_path).train_dataset()
    first = found[(0,)]
    for number in range(1, 4):
        assert torch.equal(found[(number,)]["tokens"], first["tokens"])
        features = found[(number,)]["images"]["input_features"]
        assert torch.equal(features, first["images"]["input_features"])


def test_samples_of_every_width_are_read(tmp_path: Path) -> None:
    for width in (1, 2, 3, 4):
        path = tmp_path / f"{width}.wav"
        write_sound(path, 0.01, width=width, channels=2)
        data = path.read_bytes()
        samples = sound("a", data)
        assert sound_size("a", data) == (160, RATE) and samples.shape == (160,)
        raw = np.frombuffer(data[-160 * 2 * width :], np.uint8).reshape(-1, 2, width)
        high = raw[..., -1].astype(int) - (128 if width == 1 else 256 * (raw[..., -1] > 127))
        assert np.abs(samples - high.mean(1) / 128).max() < 1 / 127


def _wav(content: bytes, coding: int, width: int, *, size: int | None = None) -> bytes:
    """A file of one channel. Coding 0xFFFE: integers by an extensible header."""
    form = struct.pack("<HHIIHH", coding, 1, RATE, RATE * width, width, 8 * width)
    if coding == 0xFFFE:
        form += struct.pack("<HHIH", 22, 8 * width, 0, 1) + bytes(14)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"LIST\1\0\0\0x\0data"
    body += struct.pack("<I", len(content) if size is None else size) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_floats_extensible_headers_and_pipes_are_read() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    for width in (4, 8):
        data = _wav(values.astype(f"<f{width}").tobytes(), 3, width)
        assert sound_size("a", data) == (64, RATE) and np.array_equal(sound("a", data), values)
    integers = (values * 32767).astype("<i2")
    for data in (
        _wav(integers.tobytes(), 0xFFFE, 2), _wav(integers.tobytes(), 1, 2, size=2**32 - 1)
    ):  # fmt: skip
        assert sound_size("a", data) == (64, RATE)
        assert np.array_equal(sound("a", data), integers.astype(np.float32) / 32768)


def test_samples_that_are_no_numbers_are_refused() -> None:
    """Integers are below 1 at any width."""
    for width, value in ((4, np.nan), (4, -np.inf), (4, 1e37), (8, 1e300), (8, -32768.0)):
        values = np.array([0.5, value], f"<f{width}")
        with pytest.raises(DataError, match="row 7: a sound has samples that are not finite, or"):
            sound("row 7", _wav(values.tobytes(), 3, width))
    assert sound("a", _wav(np.array([1.5], "<f4").tobytes(), 3, 4)).tolist() == [1.5]


def test_a_damaged_file_of_another_format_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        def read(self, **_: Any) -> None:
            raise RuntimeError("psf_fseek() failed")

    damaged = SimpleNamespace(SoundFile=lambda _: nullcontext(Damaged()))
    monkeypatch.setitem(sys.modules, "soundfile", damaged)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"row 7: a sound cannot be decoded \(psf_fseek"):
        sound("row 7", b"fLaC")


@pytest.mark.parametrize("width", [2, 3])
def test_a_cut_file_is_refused_before_the_run(width: int) -> None:
    data = _wav(bytes(300 * width), 1, width)
    for end in (len(data) - 1, len(data) - 7 * width):
        with pytest.raises(DataError, match=r"row 7: the WAV file is cut: .* says \d+ bytes"):
            sound_size("row 7", data[:end])
    with pytest.raises(DataError, match="row 7: the WAV file ends before its samples"):
        sound_size("row 7", data[:30])
    try:
        import soundfile  # noqa: F401
    except ImportError:
        with pytest.raises(MissingPackageError, match=r"row 7: a sound that is no WAV.*soundfile"):
            sound_size("row 7", _wav(bytes(64), 2, 2))


def test_what_cannot_be_heard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, content: list[Any], **options: Any) -> None:
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
        rows = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
        with pytest.raises((DataError, ConfigError), match=match):
            _data(rows, tmp_path, **options)

    def part(name: str) -> dict[str, Any]:
        return {"type": "audio", "audio": name}

    other = write_sound(tmp_path / "other.wav", 0.2, rate=8000)
    refused("8,000 samples a second, and Qwen2AudioProcessor takes 16,000", [part(other)])
    long = write_sound(tmp_path / "long.wav", 1.5)
    refused("has 1.5 s, and Qwen2AudioProcessor reads the first 1.0 s alone", [part(long)])
    longer = write_sound(tmp_path / "longer.wav", 20.0)
    sizes: list[int] = []
    blank = MEDIA["audio"].blank
    made = replace(MEDIA["audio"], blank=lambda size: sizes.append(size[0]) or blank(size))
    with monkeypatch.context() as patch:
        patch.setitem(MEDIA, "audio", made)  # type: ignore[arg-type]
        refused("has 20.0 s, and Qwen2AudioProcessor reads the first 1.0 s", [part(longer)])
    assert max(sizes) == 2 * RATE
    for samples in (0, 1, 320):
        tick = write_sound(tmp_path / "tick.wav", samples / RATE)
        refused(f"has {samples} samples .* of which Qwen2AudioProcessor makes no", [part(tick)])
    short = write_sound(tmp_path / "short.wav", 0.5)
    refused("set audio of FinetuneDataModule", [part(short)], audio=None)
    refused("need image_processor", [part(short)], audio=None, images=ImageOptions())
    refused("set images of FinetuneDataModule", [{"type": "image", "image": "a.png"}])
    refused("there is no audio", [part("none.wav")])
    refused("the audio '../none.wav' is outside of", [part("../none.wav")])
    refused("add the audio, or remove", [{"type": "audio"}])
    refused("<\\|AUDIO\\|> as words", [{"type": "text", "text": "<|AUDIO|>"}])
    with pytest.raises(ConfigError, match="both set"):
        FinetuneDataModule("a", sequence_length=8, batch_size=1, images={}, audio={})  # type: ignore[arg-type]
