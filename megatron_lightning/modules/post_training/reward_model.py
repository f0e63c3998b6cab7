"""A trained reward model as a reward of ``RolloutDataModule``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from megatron_lightning.bridge.folders.configuration import load_config
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.data.chat.chat_encoding import SupervisedOptions
from megatron_lightning.data.chat.chat_template import ChatOptions, ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.template_texts import PromptDate, parse_date
from megatron_lightning.data.rows.preference import PairEncoder
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import REWARD_TEXTS
from megatron_lightning.inference.commands.text_codec import end_tokens_of
from megatron_lightning.optional import HF_FOLDER, require

_OF_ROWS = ("tools", "chat_template_kwargs")
"""Fields of a row that its template reads."""
_LONGEST = 4096


class RewardModel:
    """``reward(prompt, answer, row)``: the score of an answer by a folder's reward model, rendered
    and tokenized as in the training of :class:`RewardModule`.

    The exported folder has the training's options of texts. A folder without them is read with the
    defaults of :class:`PreferenceDataModule`.

    Answers are scored one after another. Weights are read before the first one, in the process that
    scores.

    Args:
        path: Folder of the reward model, or a Hub id.
        device: Device of the model. "cuda": the current device of each process.
        max_length: Longest prompt with answer, in tokens. A longer one has no reward, or is cut as
            in the training. Default: the training's, or 4096.

    Raises:
        ConfigError: If the folder has no reward model.
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """

    is_serial: ClassVar[bool] = True
    """Whether answers are scored one after another."""

    def __init__(self, path: str, *, device: str = "cpu", max_length: int | None = None) -> None:
        config = load_config(local_folder(path, weights=False), trust_remote_code=False)
        names = getattr(config, "architectures", None) or ["no class"]
        if config.num_labels != 1 or not names[0].endswith("ForSequenceClassification"):
            raise ConfigError(
                f"{path} is of {names[0]} with {config.num_labels} labels, and a reward model is "
                "one for sequence classification with 1 label. Set path to a folder that was "
                "exported of a RewardModule."
            )
        self._path, self._device, self._max_length = path, device, max_length

    def __reduce__(self) -> Any:
        """Go to other processes without weights."""
        options = {"device": self._device, "max_length": self._max_length}
        return _remade, (type(self), self._path, options)

    def load(self) -> None:
        """Read the weights."""
        _ = self._model, self._encoder

    @cached_property
    def _model(self) -> Any:
        require("transformers", HF_FOLDER)
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(self._path)
        return model.to(_device_of(self._device)).eval()

    @cached_property
    def _encoder(self) -> PairEncoder:
        """Makes documents as the training did."""
        folder = local_folder(self._path, weights=False)
        file, tokenizer = folder / REWARD_TEXTS, ChatTokenizer.load(str(folder))
        trained: Mapping[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
        ends = trained.get("ends", end_tokens_of(folder))
        options = SupervisedOptions(
            sequence_length=self._max_length or trained.get("sequence_length", _LONGEST),
            truncation=trained.get("truncation", "drop"),
            chat=ChatOptions(
                reasoning=trained.get("reasoning", "keep"),
                drop_fields=tuple(trained.get("drop_fields", ())),
            ),
        )
        return PairEncoder(tokenizer, _template_of(tokenizer, trained), options, ends)

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
        document = next(self._encoder.documents([pair]), None)
        if document is None:
            return None
        with torch.no_grad():
            ids = torch.as_tensor(document.ids[None], dtype=torch.long).to(self._model.device)
            return float(self._model(input_ids=ids).logits)


def _device_of(name: str) -> torch.device:
    """Return a device, for "cuda" the current one of the process: threads begin with the first."""
    device = torch.device(name)
    is_any = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_any else device


def _template_of(tokenizer: ChatTokenizer, trained: Mapping[str, Any]) -> ChatTemplate | None:
    source = tokenizer.chat_template
    if not source:
        return None
    sources = {"default": source} if isinstance(source, str) else source
    date = trained.get("date")
    preamble = PromptDate(None if date is None else parse_date(date)).preamble(sources.values())
    values = trained.get("template_values", {})
    return ChatTemplate(sources, tokenizer.special_tokens, values, preamble)


def _remade(kind: type[RewardModel], path: str, options: Mapping[str, Any]) -> RewardModel:
    return kind(path, **options)
