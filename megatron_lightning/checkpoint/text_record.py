"""Record of what training taught a model about texts: the template of conversations, the tokens at
the end of an answer, the date of the prompts, the tokenizer, and settings of the image processor.

The data module of a run hands the record over. A checkpoint keeps the record in the state under
``"texts"``, as plain values::

    {"chat_template": text, "end_of_turn": [ids], "ends_before": [ids], "date": "2026-11-28",
     "tokenizer": files, "processor_options": {}, "scored_as": {}}

Files of the model's folder in the same checkpoint (``kept_files``) and of exported folders have the
record applied. A checkpoint without the record has the texts of the model's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_lightning.checkpoint.kept_files import KeptFiles, read_kept_files
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    IMAGE_PROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    REWARD_TEXTS,
    TOKENIZER_CONFIG,
)

TEXTS = "texts"
"""Entry of a checkpoint's state."""
_OF_TOKENIZER = (
    "token", "vocab", "merges", "special", "added", "chat_template", "spiece", "sentencepiece",
    f"{CHAT_TEMPLATES}/",
)  # fmt: skip
_COPIED = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """Chat template, end tokens, date, tokenizer and settings of images that training taught a
    model.
    """

    chat_template: str | None = None
    """Template for serving. None: the tokenizer's own."""
    end_of_turn: tuple[int, ...] = ()
    """Ids at the end of trained answers."""
    ends_before: tuple[int, ...] = ()
    """Ids at which generation stopped before training. A resumed run makes its documents of these,
    as the first run did."""
    date: str | None = None
    """Date of the prompts, as 2026-11-28. None: the template writes no date."""
    tokenizer: KeptFiles | None = None
    """Files of the data's tokenizer. None: the tokenizer of the model's folder."""
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor in place of the folder's."""
    scored_as: Mapping[str, Any] = field(default_factory=dict)
    """Options by which pairs became texts of a reward model. Empty: another model."""

    @cached_property
    def state(self) -> dict[str, Any]:
        """The record as plain values for a checkpoint."""
        return {
            "chat_template": self.chat_template,
            "end_of_turn": list(self.end_of_turn),
            "ends_before": list(self.ends_before),
            "date": self.date,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.to_state(),
            "processor_options": dict(self.processor_options),
            "scored_as": dict(self.scored_as),
        }

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any], origin: str) -> TextRecord | None:
        """Return the record in a checkpoint's state. None: a checkpoint without the record.

        Args:
            state: The state.
            origin: The checkpoint's name, for messages.

        Raises:
            CheckpointError: If the record is damaged.
        """
        entry = state.get(TEXTS)
        if entry is None:
            return None
        try:
            template, date, files = (entry.get(k) for k in ("chat_template", "date", "tokenizer"))
            options, scored_as = (
                dict(entry.get(k, {})) for k in ("processor_options", "scored_as")
            )
            ends, before = (tuple(entry.get(k, ())) for k in ("end_of_turn", "ends_before"))
            texts_fit = all(isinstance(text, str | None) for text in (template, date))
            if not texts_fit or not all(type(end) is int for end in (*ends, *before)):
                raise TypeError("a value has another type")
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{origin}: its record of texts is damaged ({error}). Use another checkpoint."
            ) from error
        tokenizer = None if files is None else KeptFiles.from_state(files, origin)
        return cls(
            chat_template=template,
            end_of_turn=ends,
            ends_before=before,
            date=date,
            tokenizer=tokenizer,
            processor_options=options,
            scored_as=scored_as,
        )

    def applied_to(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files of a model's folder with the texts of the record.

        Args:
            files: Name in the folder -> content.
        """
        contents = dict(files)
        if self.tokenizer is not None:
            contents = {n: content for n, content in files.items() if not is_of_tokenizer(n)}
            contents |= self.tokenizer.contents
        if self.chat_template is not None:
            contents = _with_template(contents, self.chat_template)
        if self.processor_options:
            contents |= _of_images(contents, self.processor_options)
        if self.scored_as:
            contents[REWARD_TEXTS] = json.dumps(self.scored_as, indent=2).encode() + b"\n"
        return contents | _generation(contents, self.end_of_turn)


def read_text_record(path: str | os.PathLike[str]) -> TextRecord | None:
    """Return the record in a checkpoint. None: a checkpoint without the record.

    Raises:
        CheckpointError: If the checkpoint or the record is damaged.
    """
    from megatron_lightning.checkpoint.reading.source import (
        open_checkpoint,  # tools start without it
    )

    return TextRecord.of_checkpoint(open_checkpoint(path).state(), str(path))


def read_texts(path: str | os.PathLike[str], model: str | None = None) -> KeptFiles | None:
    """Return the files about texts in a checkpoint: of the model's folder, or without a folder the
    files of the data's tokenizer. None: a checkpoint without both.

    Args:
        path: A checkpoint directory, plain file, or URL.
        model: Path of the model in the LightningModule. None: the first model with files.

    Raises:
        CheckpointError: If the checkpoint or a file is damaged.
    """
    files = read_kept_files(path, model)
    record = read_text_record(path) if files is None else None
    if record is None or record.tokenizer is None:
        return files
    return KeptFiles(record.applied_to({}))


def end_tokens(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end tokens of a model by its files: of the generation configuration, or else of
    the configuration.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        values: Mapping[str, Any] = json.loads(files[name]) if name in files else {}
        nested = values.get("text_config") or {}
        end_token = values.get("eos_token_id", nested.get("eos_token_id"))
        if end_token is not None:
            return (end_token,) if isinstance(end_token, int) else tuple(end_token)
    return ()


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file of a model's folder belongs to the tokenizer."""
    return name.startswith(_OF_TOKENIZER) or name.endswith((".model", ".tiktoken"))


def _with_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Return the files with a single template of conversations, wherever a reader looks first."""
    contents = {
        name: content
        for name, content in files.items()
        if not name.startswith(f"{CHAT_TEMPLATES}/") and name != "chat_template.json"
    }
    contents[CHAT_TEMPLATE] = template.encode()
    settings = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if settings.get("chat_template", template) != template:
        settings["chat_template"] = template
        contents[TOKENIZER_CONFIG] = json.dumps(settings, indent=2).encode() + b"\n"
    elif "chat_template" in settings and CHAT_TEMPLATE not in files:
        del contents[CHAT_TEMPLATE]  # the same text stands in the configuration
    return contents


def _of_images(files: Mapping[str, bytes], options: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the configuration of the image processor with other settings, wherever it stands."""
    processor = json.loads(files.get(PROCESSOR_CONFIG, b"{}"))
    if "image_processor" in processor:
        processor["image_processor"] |= options
        return {PROCESSOR_CONFIG: json.dumps(processor, indent=2).encode() + b"\n"}
    settings = json.loads(files.get(IMAGE_PROCESSOR_CONFIG, b"{}")) | dict(options)
    return {IMAGE_PROCESSOR_CONFIG: json.dumps(settings, indent=2).encode() + b"\n"}


def _generation(files: Mapping[str, bytes], ends: tuple[int, ...]) -> dict[str, bytes]:
    """Return the generation configuration with further end tokens. Empty: nothing changes."""
    known = end_tokens(files)
    every = [*known, *(end for end in ends if end not in known)]
    if len(every) == len(known):
        return {}
    values = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    if not values:  # transformers would read these in config.json
        config = json.loads(files.get(CONFIG, b"{}"))
        values = {key: config[key] for key in _COPIED if config.get(key) is not None}
    values.pop("_from_model_config", None)  # transformers may take config.json's values instead
    values["eos_token_id"] = every if len(every) > 1 else every[0]
    return {GENERATION_CONFIG: json.dumps(values, indent=2).encode() + b"\n"}
