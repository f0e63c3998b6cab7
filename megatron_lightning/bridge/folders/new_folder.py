"""A new Hugging Face folder for a :class:`GPTModel` trained from scratch: names by a family, files
as in ``huggingface_hub``, and a user's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.families import family_like, family_of
from megatron_lightning.bridge.family_rules.family import (
    Family,
    missing_fields,
    new_shapes,
    to_theirs,
)
from megatron_lightning.bridge.folders.configuration import config_text
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.folders.hub import TEXTS, local_folder
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.folders.safetensors_file import StoredTensor
from megatron_lightning.bridge.gpt import GPTFolder
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.checkpoint.text_record import TextRecord
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import CARD, CONFIG, GENERATION_CONFIG, WEIGHTS_INDEX
from megatron_lightning.models.blueprint import saved_tensors
from megatron_lightning.optional import HF_FOLDER, require
from megatron_lightning.parallel.shards.spec import Box

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model of the class `{architecture}`, trained with `megatron_lightning`.
"""
_NO_TOKENIZER = (CONFIG, GENERATION_CONFIG, WEIGHTS_INDEX, CARD, "params.json")
_SPECIAL = ("bos", "eos", "pad")
_MARK = "0123"  # an answer with a recognizable end in a chat template


class NewFolder(FolderTensors):
    """The table and the other files of a folder to be written.

    Args:
        path: The checkpoint, for messages.
        family: The folder's family.
        config: The model.
        dtypes: Dtypes of the model's parameters.
        tokenizer: Folder or Hub id of a tokenizer. None: the tokenizer of ``texts``. Without both
            the folder gets no tokenizer.
        texts: What training taught about texts.

    Raises:
        ConfigError: If the tokenizer cannot be read, or has more entries than the vocabulary.
    """

    def __init__(
        self,
        path: Path,
        family: type[Family],
        config: TransformerConfig,
        dtypes: Mapping[str, torch.dtype],
        *,
        tokenizer: str | None,
        texts: TextRecord | None,
    ) -> None:
        require("huggingface_hub", HF_FOLDER)
        from huggingface_hub.errors import StrictDataclassFieldValidationError

        super().__init__(path)
        shapes = new_shapes(family, config)
        table = {name: (shape, dtypes[ours]) for name, (shape, ours) in shapes.items()}
        files = new_files(table)
        for file, header in files.headers.items():
            self.add_file(file, header)
        self.config = to_theirs(family, config)
        """Configuration of ``transformers``."""
        self.config.architectures = [family.architecture]
        for kind in _SPECIAL:  # the class's defaults belong to another tokenizer
            with suppress(StrictDataclassFieldValidationError):  # CWM demands an id
                setattr(self.config, f"{kind}_token_id", None)
        self.config.dtype = dtypes["decoder.final_layernorm.weight"]
        contents = self._texts(config, tokenizer, texts)
        if files.index_file is not None:
            contents[WEIGHTS_INDEX] = files.index_file
        card = _CARD.format(name=path.stem, architecture=family.architecture)
        contents |= {CONFIG: config_text(self.config), CARD: card.encode()}
        self._contents = contents

    @cached_property
    def files(self) -> KeptFiles:
        """Configuration, tokenizer and model card."""
        return KeptFiles(self._contents)

    def _read(self, file: str, stored: StoredTensor, box: Box, out: Tensor) -> None:
        raise CheckpointError(f"{stored.name} is in no folder yet.")  # only made, never read

    def _texts(
        self, config: TransformerConfig, tokenizer: str | None, texts: TextRecord | None
    ) -> dict[str, bytes]:
        """Return the files of a tokenizer, with what training taught."""
        if tokenizer is None and texts is not None and texts.tokenizer is not None:
            with texts.tokenizer.unpacked() as folder:
                contents = self._use_tokenizer(str(folder), config)
        else:
            contents = {} if tokenizer is None else self._use_tokenizer(tokenizer, config)
        if texts is None or not contents:
            return contents
        return replace(texts, tokenizer=None).applied_to(contents)

    def _use_tokenizer(self, path: str, config: TransformerConfig) -> dict[str, bytes]:
        """Return the files of a tokenizer. Copy the special tokens into the configuration."""
        tokenizer, folder = _load_tokenizer(path)
        if len(tokenizer) > config.vocab_size:
            raise ConfigError(
                f"the tokenizer {path} has {len(tokenizer):,} entries, and vocab_size is "
                f"{config.vocab_size:,}. Name the tokenizer that the model was trained with."
            )
        names = [f"{kind}_token_id" for kind in _SPECIAL]
        ids = {name: getattr(tokenizer, name) for name in names}
        for key, value in ids.items():
            setattr(self.config, key, value)
        ends = dict.fromkeys((ids["eos_token_id"], end_of_turn(tokenizer)))
        ends.pop(None, None)
        generation = {key: value for key, value in ids.items() if value is not None}
        if len(ends) > 1:
            generation["eos_token_id"] = list(ends)
        contents = {
            file.name: file.read_bytes()
            for pattern in TEXTS
            for file in folder.glob(pattern)
            if file.is_file() and file.name not in _NO_TOKENIZER
        }
        contents[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode() + b"\n"
        return contents


def _load_tokenizer(path: str) -> tuple[Any, Path]:
    require("transformers", HF_FOLDER)
    from transformers import AutoTokenizer

    folder = local_folder(path, weights=False)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False), folder
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no tokenizer that transformers reads ({str(error).splitlines()[0]}). Name "
            "a folder that save_pretrained of a tokenizer has written, or leave it out."
        ) from error


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token behind an answer in the chat template. None: there is no
    such token.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer's chat template cannot be filled ({error}), so the token that ends a "
            "turn is unknown. Mend the template, or remove it."
        ) from error
    behind = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False).input_ids[:1]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return behind[0] if behind and behind[0] in special else None


def new_gpt_folder(
    checkpoint: str,
    config: TransformerConfig,
    stored: Mapping[str, TensorInfo],
    *,
    family: str | None = None,
    tokenizer: str | None = None,
    texts: TextRecord | None = None,
    dtype: torch.dtype | None = None,
) -> GPTFolder:
    """Return the folder to write for a :class:`GPTModel`.

    Args:
        checkpoint: The checkpoint, for messages.
        config: The model.
        stored: The checkpoint's tensors.
        family: Name or class path of a family. None: the first family describing the model.
        tokenizer: Folder or Hub id of a tokenizer. None: the tokenizer of ``texts``.
        texts: What training taught about texts. None: nothing is known.
        dtype: Dtype of the parameters. None: the dtypes of the checkpoint.

    Raises:
        ConfigError: If no family, or not the named family, describes the model, naming the fields.
            Or if the tokenizer does not fit.
    """
    chosen = family_like(config) if family is None else family_of(family)
    if family is not None and (missing_names := missing_fields(chosen, config)):
        raise ConfigError(
            f"the family {family} does not describe the model of {checkpoint}: it lacks "
            f"{', '.join(missing_names)}. Leave --family out to take the first that does."
        )
    require("transformers", HF_FOLDER)
    import transformers

    model_class = getattr(transformers, chosen.architecture)
    dtypes = _dtypes(config, stored, dtype)
    folder = NewFolder(Path(checkpoint), chosen, config, dtypes, tokenizer=tokenizer, texts=texts)
    return GPTFolder(chosen, folder, folder.config, model_class)


def _dtypes(
    config: TransformerConfig, stored: Mapping[str, TensorInfo], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter of a model: the checkpoint's dtype, or the requested
    dtype for floating parameters.
    """
    dtypes = {}
    for name, _ in saved_tensors(config):
        own_dtype = next(
            (info.dtype for key, info in stored.items() if key.endswith(f".{name}")), None
        )
        if own_dtype is None:
            raise CheckpointError(
                f"the checkpoint has no {name}, which its configuration describes. Use another "
                "checkpoint."
            )
        dtypes[name] = dtype if dtype is not None and own_dtype.is_floating_point else own_dtype
    return dtypes
