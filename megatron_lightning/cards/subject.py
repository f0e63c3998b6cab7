"""The model of a card: folder, revision, a reduced copy, and expected logits."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders.configuration import config_file
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.hf_models.logits import TOLERANCE
from megatron_lightning.errors import ConfigError, DataError

REDUCED_LAYERS = 4
"""Layers of a reduced model."""
_DIGITS = 16
_WORDS_OF_DROPOUT = ("drop", "jitter")


@dataclass(frozen=True)
class Subject:
    """A model to verify."""

    name: str
    """As written by the user."""
    path: Path
    revision: str
    """Commit of the Hub, or a digest of all files of a folder."""
    trusts: bool = False
    """Whether code in the folder may run."""

    @classmethod
    def of(cls, model: str, revision: str | None, *, trusts: bool) -> Subject:
        """Return the model in a folder, or of a Hub id, also as ``ID@REVISION``.

        Raises:
            MissingCheckpointError: If there is no such folder, and the Hub has no such id, or the
                folder has no configuration.
        """
        name, asked = _split(model)
        path = local_folder(name, revision=revision or asked)
        config_file(path)  # before the digest: another folder may hold anything
        is_snapshot = path.parent.name == "snapshots"
        return cls(name, path, path.name if is_snapshot else digest_of(path), trusts)

    def bridge(self, family: str | None = None) -> AutoBridge:
        """Return the bridge of the folder."""
        return AutoBridge.from_hf_pretrained(
            self.path, trust_remote_code=self.trusts, family=family
        )


@dataclass(frozen=True)
class RecordedLogits:
    """Logits of another program, or of another day."""

    tokens: Tensor
    """[b, s]"""
    logits: Tensor
    """Of the last token of each row [b, v]."""
    tolerance: float = TOLERANCE
    reason: str = "fp32 on both sides"

    @classmethod
    def read(cls, path: Path) -> RecordedLogits:
        """Read a JSON file with ``tokens`` [b, s] and ``logits`` [b, v], and where the values are
        not of fp32 with ``tolerance`` and its ``reason``.

        Raises:
            DataError: If the file has another form.
        """
        try:
            values = json.loads(path.read_text())
            tokens, logits = torch.tensor(values["tokens"]), torch.tensor(values["logits"])
            tolerance = {key: values[key] for key in ("tolerance", "reason") if key in values}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} cannot be read as recorded logits ({type(error).__name__}: {error}). It "
                'holds {"tokens": [b, s], "logits": [b, v]}, the logits of each row\'s last token.'
            ) from error
        is_formed = tokens.ndim == 2 and logits.ndim == 2 and len(tokens) == len(logits) > 0
        if not is_formed or tokens.is_floating_point():
            raise DataError(
                f"{path} has tokens {tuple(tokens.shape)} and logits {tuple(logits.shape)}; must "
                "be whole numbers [b, s] and the logits of each row's last token [b, v]."
            )
        if len(tolerance) == 1:
            raise DataError(
                f"{path} has {next(iter(tolerance))} alone: a tolerance comes with its reason. "
                "Give both, or none for fp32."
            )
        return cls(tokens, logits.float(), **tolerance)


def reference_of(text: str | None, *, trusts: bool) -> Subject | RecordedLogits | None:
    """Return the reference named by ``--reference``: recorded logits (``.json``), or another folder
    or Hub id, also as ``FOLDER@REVISION``.

    Raises:
        ConfigError: If a folder's revision is not the digest in the reference.
        DataError: If recorded logits have another form.
        MissingCheckpointError: If there is no such folder.
    """
    if text is None:
        return None
    if text.endswith(".json"):
        return RecordedLogits.read(Path(text))
    found = Subject.of(text, None, trusts=trusts)
    _, asked = _split(text)
    if asked and Path(found.name).is_dir() and not found.revision.startswith(asked):
        raise ConfigError(
            f"reference is {text}, and the files of {found.name} have the digest "
            f"{found.revision}: it is another folder, or was changed. Name the folder that was "
            "meant, or its digest."
        )
    return found


def digest_of(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:_DIGITS]


def reduce_model(subject: Subject, target: Path) -> tuple[Subject, str]:
    """Write a folder with the first layers of a model's configuration and random weights, and
    return the folder with the reductions.
    """
    config = subject.bridge().config
    num_layers = int(config.num_hidden_layers)
    kept = min(num_layers, REDUCED_LAYERS)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(config, name, list(value)[:kept])
    config.num_hidden_layers = kept
    torch.manual_seed(0)
    bridge = AutoBridge.from_hf_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge.save_hf_pretrained(bridge.to_model(dtype=torch.float32), target)
    what = (
        f"fit, resume, lora, merge and text have {kept} of {num_layers} layers and random weights "
        "in place of the folder's"
    )
    return Subject(subject.name, target, subject.revision, subject.trusts), what


def dropouts_of(config: Any) -> dict[str, float]:
    """Return the dropouts of a configuration, as zeros."""
    return {
        name: 0.0
        for name, value in config.to_dict().items()
        if isinstance(value, float) and value and any(word in name for word in _WORDS_OF_DROPOUT)
    }


def _split(text: str) -> tuple[str, str | None]:
    """Return name and revision of ``NAME@REVISION``. A folder's name may have an @."""
    name, at, revision = text.rpartition("@")
    return (text, None) if not at or Path(text).exists() else (name, revision)
