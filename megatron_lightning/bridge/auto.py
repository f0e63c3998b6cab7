"""``AutoBridge``: a Hugging Face folder or Hub id, and the model in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lightning.bridge.folder import INDEX, SINGLE, HuggingFaceFolder
from megatron_lightning.bridge.untouched import defer_weights, is_deferred, lazy_model
from megatron_lightning.errors import ConfigError, MissingCheckpointError

_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


class AutoBridge:
    """The model in a Hugging Face folder.

    Args:
        path: The folder.
        trust_remote_code: Whether code in the folder may run.
        attn_implementation: Attention of ``transformers``, such as "sdpa" or "eager"; None: the
            model's default.

    Raises:
        ConfigError: If the folder needs code of its own and ``trust_remote_code`` is False.
    """

    def __init__(
        self,
        path: Path,
        *,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ) -> None:
        self.path = path
        """The folder."""
        self.config = _load_config(path, trust_remote_code=trust_remote_code)
        """Configuration of ``transformers``."""
        self._trusts = trust_remote_code
        self._options: dict[str, Any] = {}
        if attn_implementation is not None:
            self._options["attn_implementation"] = attn_implementation

    @classmethod
    def from_hf_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ) -> AutoBridge:
        """Return the bridge of a folder or a Hub id.

        Args:
            path: A folder, or a Hub id such as ``meta-llama/Llama-3.2-1B``. A Hub id is read from
                the local cache if it is there.
            revision: Branch, tag or commit of the Hub id; None: main.
            trust_remote_code: Whether code in the folder may run.
            attn_implementation: See the class.

        Raises:
            MissingCheckpointError: If there is no such folder, and the Hub has no such id.
            ConfigError: See the class.
        """
        folder = local_folder(path, revision=revision)
        options: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
        }
        return cls(folder, **options)

    @classmethod
    def can_handle(cls, path: str | Path, *, revision: str | None = None) -> bool:
        """Return whether ``transformers`` knows the model; no weights are downloaded."""
        try:
            folder = local_folder(path, revision=revision, patterns=("*.json",))
            return cls(folder).model_class is not None
        except (ConfigError, MissingCheckpointError):
            return False

    @property
    def model_class(self) -> Any:
        """Class of the model: ``architectures`` of config.json, so that no part of it is left out.

        Raises:
            ConfigError: If ``transformers`` has no such class.
        """
        import transformers

        names = list(getattr(self.config, "architectures", None) or ())
        remote = getattr(self.config, "auto_map", {}) if self._trusts else {}
        if "AutoModelForCausalLM" in remote:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(remote["AutoModelForCausalLM"], str(self.path))
        found = next((getattr(transformers, name, None) for name in names), None)
        if found is None:
            raise ConfigError(
                f"{self.path / 'config.json'} names the architectures {names}, and transformers "
                f"{transformers.__version__} has none of them. Install a version that has, or set "
                "trust_remote_code=True if the folder has code that you trust."
            )
        return found

    def to_model(self, *, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the untouched model of ``transformers``.

        In ``configure_model`` under ``MegatronStrategy`` the model is on ``meta``, and each rank
        reads the part of the folder that it owns when the model is divided. Elsewhere it is what
        ``from_pretrained`` returns.

        Args:
            dtype: Dtype of the parameters; None: torch's default dtype, which Lightning sets to the
                Trainer's precision in ``configure_model``: bf16 for ``bf16-true``, fp32 for
                ``32-true`` and ``bf16-mixed``.

        Raises:
            CheckpointError: If the folder does not fit the model, or is damaged.
        """
        options = {**self._options, "dtype": dtype or torch.get_default_dtype()}
        if is_deferred():
            folder = HuggingFaceFolder(self.path)
            return defer_weights(lazy_model(folder, self.model_class, self.config, **options))
        model: nn.Module = self.model_class.from_pretrained(
            self.path, config=self.config, **options
        )
        return model


def local_folder(
    path: str | Path, *, revision: str | None = None, patterns: Sequence[str] = _DOWNLOADED
) -> Path:
    """Return a folder, or the local snapshot of a Hub id, which is downloaded if it is not cached.

    Args:
        path: A folder, or a Hub id.
        revision: Branch, tag or commit of the Hub id; None: main.
        patterns: Files that are downloaded.

    Raises:
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "allow_patterns": list(patterns)}
    try:
        snapshot = Path(snapshot_download(str(path), local_files_only=True, **options))
        if (snapshot / SINGLE).exists() or (snapshot / INDEX).exists():
            return snapshot
    except LocalEntryNotFoundError:
        pass  # not in the cache: the download below fetches the model, or says why it cannot
    except HFValidationError as error:
        raise MissingCheckpointError.at(path) from error
    try:
        return Path(snapshot_download(str(path), **options))
    except Exception as error:
        raise MissingCheckpointError(
            f"{path} is neither a folder nor a model that the Hub gives ({type(error).__name__}: "
            f"{error}). Check the path, the revision {revision or 'main'}, and the access of this "
            "machine; HF_HUB_OFFLINE=1 reads the cache only."
        ) from error


def _load_config(path: Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise MissingCheckpointError(
            f"{path} has no config.json, so its model is unknown. Name a folder that "
            "save_pretrained of transformers has written."
        )
    try:
        plain = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{file} is no JSON ({error}). Download or restore the folder."
        ) from error
    try:
        # False, not None: transformers would ask on the terminal of every rank.
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as error:
        advice = "Install a version of transformers that knows it."
        if "auto_map" in plain and not trust_remote_code:
            advice = "The folder has code of its own: set trust_remote_code=True if you trust it."
        raise ConfigError(
            f"{file} describes a model of type {plain.get('model_type')!r}, which cannot be made "
            f"({str(error).splitlines()[0]}). {advice}"
        ) from error
