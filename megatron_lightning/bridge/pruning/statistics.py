"""Statistics of a model's layers over an evaluation's tokens: the file that ``LayerStatistics``
writes, and ``convert prune`` and ``convert export`` read.

An entry is ``path of a module/quantity``, with the path as in :class:`GPTModel`:

* ``….mlp.linear_fc2/squares`` [inputs]: sums of the squares of a linear layer's inputs over tokens.
  ``amax`` []: their largest absolute value. ``tokens`` []: the number of tokens. ``moments``
  [inputs, inputs]: sums of the products of two inputs, if asked for.
* ``….experts.linear_fc1/amax`` [E], and of ``linear_fc2``: those of each expert's inputs.
* ``….self_attention.keys/amax`` []: of keys, behind rotary. ``values``: of values.
* ``….mlp.experts/squares`` [E]: sums of the squares of each expert's output over the expert's
  tokens, before the router weighs the output. ``tokens`` [E]: their numbers.
* ``decoder.layers.N/cosines`` []: sum over tokens of the cosine between a block's input and output.

The file's metadata has a digest of the weights of the first block, and of the other blocks'
attention and norms, by which readers find the statistics of another model: one with fewer blocks,
or with later blocks trained further, has the same first block.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.format.files import beside, new_identifier
from megatron_lightning.errors import CheckpointError, MissingCheckpointError
from megatron_lightning.optional import require
from megatron_lightning.parallel.shards.digest import as_text, digest_of_tensors

_MARK: Mapping[str, str] = {"format": "megatron_lightning.layer_statistics"}
_MODEL = "model"
_MOMENTS = "/moments"
_IN_DIGEST = re.compile(r"decoder\.layers\.(0\.|\d+\.(?!mlp\.)).*\.weight")
_TAKE = (
    "Take statistics of this model: megatron-lightning validate --model=GPTLightningModule "
    "--model.init_from_hf=FOLDER with the callback LayerStatistics."
)


def is_in_digest(name: str) -> bool:
    """Return whether a parameter of a ``GPTModel`` is in the digest of a model."""
    return _IN_DIGEST.fullmatch(name) is not None


class Statistics:
    """Sums over tokens by module and quantity.

    Args:
        entries: ``module/quantity`` -> tensor.
        path: The file, for messages.
        model: Digest of the model. None: not known.
    """

    def __init__(
        self, entries: Mapping[str, Tensor], path: object, model: str | None = None
    ) -> None:
        self.entries = entries
        self._path = path
        self.model = model
        """Digest of the model."""
        self._in_file = frozenset[str]()  # large entries, which are read when needed

    @classmethod
    def summed(
        cls, parts: Iterable[Mapping[str, Tensor]], path: object, model: str | None = None
    ) -> Statistics:
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
        return cls(entries, path, model)

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
                names = [*file.keys()]
                entries = {k: file.get_tensor(k) for k in names if not k.endswith(_MOMENTS)}
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no file of safetensors ({error}). {_TAKE}") from error
        if _MARK.items() - metadata.items():
            raise CheckpointError(f"{path} holds no statistics of layers. {_TAKE}")
        statistics = cls(entries, path, metadata.get(_MODEL))
        statistics._in_file = frozenset(names) - entries.keys()
        return statistics

    def save(self, path: Path) -> None:
        """Write the file, in a single rename."""
        require("safetensors", "LayerStatistics")
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        pending = beside(path, f".tmp-{new_identifier()}")
        try:
            model = {} if self.model is None else {_MODEL: self.model}
            entries = {
                key: value.float() if key.endswith(_MOMENTS) else value
                for key, value in sorted(self.entries.items())
            }
            save_file(entries, pending, metadata={**_MARK, **model})
            os.replace(pending, path)
        finally:
            pending.unlink(missing_ok=True)

    def has_moments(self, module: str) -> bool:
        """Return whether there are second moments of a linear layer's inputs."""
        return f"{module}{_MOMENTS}" in self._in_file

    def moments(self, module: str) -> Tensor:
        """Read the second moments [inputs, inputs] of a linear layer of the file."""
        from safetensors import safe_open

        with safe_open(str(self._path), framework="pt") as file:
            moments: Tensor = file.get_tensor(f"{module}{_MOMENTS}")
        return moments

    def check(self, tensors: Mapping[str, Lazy], folder: object) -> None:
        """Check that the statistics are of a model.

        Args:
            tensors: Name in the ``GPTModel`` -> tensor.
            folder: Its folder, for messages.

        Raises:
            CheckpointError: If they are of another one.
        """
        if self.model is None:
            return
        counted = ((name, x.read()) for name, x in tensors.items() if is_in_digest(name))
        found = as_text(digest_of_tensors(counted), "gpt")
        if found != self.model:
            raise CheckpointError(
                f"{self._path} has statistics of a model whose blocks have the digest "
                f"{self.model}, and those of {folder} have {found}: the weights are others. {_TAKE}"
            )

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
