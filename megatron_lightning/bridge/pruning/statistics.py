"""Statistics of a model's layers over an evaluation's tokens: the file that ``LayerStatistics``
writes, and ``convert prune`` and ``convert export`` read.

An entry is ``path of a module/quantity``, with the path as in :class:`GPTModel`:

* ``….mlp.linear_fc2/squares`` [inputs]: sums of the squares of a linear layer's inputs over tokens.
  ``amax`` []: their largest absolute value. ``tokens`` []: the number of tokens.
* ``….experts.linear_fc1/amax`` [E], and of ``linear_fc2``: those of each expert's inputs.
* ``….self_attention.keys/amax`` []: of keys, behind rotary. ``values``: of values.
* ``….mlp.experts/squares`` [E]: sums of the squares of each expert's output over the expert's
  tokens, before the router weighs the output. ``tokens`` [E]: their numbers.
* ``decoder.layers.N/cosines`` []: sum over tokens of the cosine between a block's input and output.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.checkpoint.format.files import beside, new_identifier
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.optional import require

_MARK: Mapping[str, str] = {"format": "megatron_lightning.layer_statistics"}
_TAKE = (
    "Take statistics of this model: megatron-lightning validate --model=GPTLightningModule "
    "--model.init_from_hf=FOLDER with the callback LayerStatistics."
)


class Statistics:
    """Sums over tokens by module and quantity.

    Args:
        entries: ``module/quantity`` -> tensor.
        path: The file, for messages.
    """

    def __init__(self, entries: Mapping[str, Tensor], path: object) -> None:
        self.entries = entries
        self._path = path

    @classmethod
    def summed(cls, parts: Iterable[Mapping[str, Tensor]], path: object) -> Statistics:
        """Return the statistics of all ranks: sums, and the largest ``amax``."""
        entries: dict[str, Tensor] = {}
        for part in parts:
            for key, value in part.items():
                if key not in entries:
                    entries[key] = value
                elif key.endswith("/amax"):
                    entries[key] = torch.maximum(entries[key], value)
                else:
                    entries[key] = entries[key] + value
        return cls(entries, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file.

        Raises:
            CheckpointError: If the file is missing, or of another kind.
        """
        require("safetensors", "statistics of layers")
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise MissingCheckpointError(f"there is no file {path} with statistics. {_TAKE}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                entries = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no file of safetensors ({error}). {_TAKE}") from error
        if _MARK.items() - metadata.items():
            raise CheckpointError(f"{path} holds no statistics of layers. {_TAKE}")
        return cls(entries, path)

    def save(self, path: Path) -> None:
        """Write the file, in a single rename."""
        require("safetensors", "LayerStatistics")
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        pending = beside(path, f".tmp-{new_identifier()}")
        try:
            save_file(dict(sorted(self.entries.items())), pending, metadata=dict(_MARK))
            os.replace(pending, path)
        finally:
            pending.unlink(missing_ok=True)

    def of(self, module: str, quantity: str, size: int | None = None) -> Tensor:
        """Return a quantity of a module, of ``size`` entries. None: a number.

        Raises:
            CheckpointError: If there is no such entry, or the entry has another size.
        """
        value = self.entries.get(f"{module}/{quantity}")
        wanted = () if size is None else (size,)
        if value is None or tuple(value.shape) != wanted:
            found = "none" if value is None else f"shape {list(value.shape)}"
            raise CheckpointError(
                f"{self._path} has {found} for {quantity} of {module}, and the model needs shape "
                f"{list(wanted)}. {_TAKE}"
            )
        return value
