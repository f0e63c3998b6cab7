"""Conversations with sounds as documents and rows."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from megatron_lightning.data.images.media import sound, sound_size
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import (
    AudioOptions,
    FinetuneDataModule,
    HuggingFaceModule,
    ImageOptions,
)
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


def test_what_cannot_be_heard_is_refused(tmp_path: Path) -> None:
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
    short = write_sound(tmp_path / "short.wav", 0.5)
    refused("set audio of FinetuneDataModule", [part(short)], audio=None)
    refused("need image_processor", [part(short)], audio=None, images=ImageOptions())
    refused("set images of FinetuneDataModule", [{"type": "image", "image": "a.png"}])
    refused("there is no audio", [part("none.wav")])
    refused("<\\|AUDIO\\|> as words", [{"type": "text", "text": "<|AUDIO|>"}])
    with pytest.raises(ConfigError, match="both set"):
        FinetuneDataModule("a", sequence_length=8, batch_size=1, images={}, audio={})  # type: ignore[arg-type]
