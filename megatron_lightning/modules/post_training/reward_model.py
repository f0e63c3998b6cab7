"""A trained reward model as a reward of ``RolloutDataModule``."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from megatron_lightning.bridge.folders.configuration import load_config
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.data.chat.chat_encoding import SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.rows.preference import PairEncoder
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError
from megatron_lightning.optional import HF_FOLDER, require

_OF_ROWS = ("tools", "chat_template_kwargs")
"""Fields of a row that its template reads."""


class RewardModel:
    """``reward(prompt, answer, row)``: the score of an answer by a folder's reward model, rendered
    and tokenized as in the training of :class:`RewardModule`.

    Weights are read at the first call, in the process that calls.

    Args:
        path: Folder of the reward model, or a Hub id.
        device: Device of the model, such as "cuda:0".
        max_length: Longest prompt with answer, in tokens. A longer one has no reward.

    Raises:
        ConfigError: If the folder has no reward model.
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """

    def __init__(self, path: str, *, device: str = "cpu", max_length: int = 4096) -> None:
        config = load_config(local_folder(path, weights=False), trust_remote_code=False)
        names = getattr(config, "architectures", None) or ["no class"]
        if config.num_labels != 1 or not names[0].endswith("ForSequenceClassification"):
            raise ConfigError(
                f"{path} is of {names[0]} with {config.num_labels} labels, and a reward model is "
                "one for sequence classification with 1 label. Set path to a folder that was "
                "exported of a RewardModule."
            )
        self._settings = (path, device, max_length)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Go to other processes without weights."""
        path, device, max_length = self._settings
        return _remade, (type(self), path, {"device": device, "max_length": max_length})

    @cached_property
    def _model(self) -> Any:
        require("transformers", HF_FOLDER)
        from transformers import AutoModelForSequenceClassification

        path, device, _ = self._settings
        return AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self._settings[0])

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self._tokenizer.chat_template
        return ChatTemplate(source, self._tokenizer.special_tokens) if source else None

    def __call__(
        self, prompt: str | Sequence[Mapping[str, Any]], answer: str, row: Mapping[str, Any]
    ) -> float | None:
        """Return the score of an answer. None: the text is too long."""
        if not isinstance(answer, str):
            raise ConfigError(
                "the prompt is ids, and a reward model scores texts. Write prompt as text or "
                "messages."
            )
        fields = {name: row[name] for name in _OF_ROWS if name in row}
        pair = Row("the answer", {**fields, "prompt": prompt, "chosen": answer, "rejected": answer})
        with self._lock:  # rewards are called in threads
            options = SupervisedOptions(sequence_length=self._settings[2])
            encoder = PairEncoder(self._tokenizer, self._template, options)
            document = next(encoder.documents([pair]), None)
            if document is None:
                return None
            with torch.no_grad():
                ids = torch.as_tensor(document.ids[None], dtype=torch.long).to(self._model.device)
                return float(self._model(input_ids=ids).logits)


def _remade(kind: type[RewardModel], path: str, options: Mapping[str, Any]) -> RewardModel:
    return kind(path, **options)
