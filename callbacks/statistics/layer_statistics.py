"""Write statistics of a model's layers over an evaluation's tokens."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.assembly.compile import is_compiled
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.bridge.pruning.statistics import Statistics, is_in_digest
from megatron_lightning.callbacks.statistics.sums import Division, LayerSums, moments_over
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.layers.step_report import is_recording
from megatron_lightning.parallel.shards.digest import (
    as_text,
    digest_of_shards,
    digest_of_tensors,
)
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.strategies.trainer_ranks import context_of, run_of, specs_of

_BLOCK = re.compile(r"(|.+\.)decoder\.layers\.\d+")


class LayerStatistics(pl.Callback):
    """Write statistics for ``megatron-lightning convert prune`` and ``convert export``: sums over
    the tokens of ``validate`` of squares of linear layers' inputs, squares of experts' outputs, and
    cosines of blocks, and the largest inputs, keys and values. Equal on every layout. Padding at
    the end of rows does not count.

    The model is a ``GPTModel``.

    Args:
        path: The file of safetensors to write.
        second_moments: Whether to sum the products of each two inputs of linear layers, for
            ``convert export --scales gptq``. They take 8 bytes times the square of a layer's inputs
            in the memory of a rank, for all of its layers, and rank 0 gathers those of all ranks,
            in 4 bytes.

    Raises:
        ConfigError: If there is no ``GPTModel``, blocks are compiled, layers have adapters or
            weights as quantized data, or experts are divided.
    """

    def __init__(self, path: str | os.PathLike[str], second_moments: bool = False) -> None:
        self.path = Path(path)
        self.second_moments = second_moments
        self._sums: LayerSums | None = None
        self._prefix = ""  # path of the model, with a dot

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sums": None}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put hooks on the blocks. All ranks call this."""
        if trainer.sanity_checking:
            return
        matches = {n: (_BLOCK.fullmatch(n), child) for n, child in present_modules(pl_module)}
        blocks = {n: child for n, (match, child) in matches.items() if match is not None}
        if not trainer.strategy.reduce_boolean_decision(bool(blocks), all=False):
            raise ConfigError(
                f"{type(pl_module).__name__} has no blocks decoder.layers.N of a GPTModel, whose "
                "names statistics have. Load the folder as one: --model=GPTLightningModule "
                "--model.init_from_hf=FOLDER."
            )
        compiled = any(is_compiled(child) for block in blocks.values() for child in block.modules())
        if trainer.strategy.reduce_boolean_decision(compiled, all=False):
            raise ConfigError(
                "LayerStatistics reads the inputs of layers inside of blocks, and the blocks are "
                "compiled to graphs without those. Leave compile out of the strategy here."
            )
        changed = bool(adapted_layers(pl_module)) or any(
            is_quantized(x.dtype) for block in blocks.values() for x in block.parameters()
        )
        if trainer.strategy.reduce_boolean_decision(changed, all=False):
            raise ConfigError(
                "LayerStatistics names the weights of a folder, and the layers have adapters or "
                "weights as quantized data (fp8_param_gather), which no folder has. Export the "
                "checkpoint (adapters merge, or convert export), and validate the folder."
            )
        context, run = context_of(trainer, "LayerStatistics"), run_of(trainer)
        self._prefix = next((m.group(1) for m, _ in matches.values() if m is not None), "")
        divides = run is not None and run.part.shards_sequence
        division = Division(context.tp, divides, specs_of(trainer))
        self._sums = LayerSums(blocks, self._prefix, division, partial(is_recording, pl_module))
        self._sums.takes_moments = self.second_moments

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up the ranks, and write the file. All ranks call this."""
        if self._sums is None:
            return
        sums, self._sums = self._sums, None
        sums.close()
        context = context_of(trainer, "LayerStatistics")
        world = context.axis("world")
        large = {key: x for key, x in sums.entries.items() if key.endswith("/moments")}
        small = {key: x for key, x in sums.entries.items() if key not in large}
        parts = world.all_gather_object((small, self._digest(trainer, pl_module)))
        entries, digests = zip(*parts, strict=True)
        found = Statistics.summed(entries, self.path, as_text(sum(digests), "gpt"))
        moments = moments_over(world, large, context.device)
        kept = {key: x.float() for key, x in moments if trainer.is_global_zero}
        if trainer.is_global_zero:
            Statistics({**found.entries, **kept}, self.path, found.model).save(self.path)

    def _digest(self, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        """Return the contribution of this rank's weights to the digest of the model."""
        named = {
            name.removeprefix(self._prefix): (name, x) for name, x in module.named_parameters()
        }
        counted = {own: found for own, found in named.items() if is_in_digest(own)}
        run = run_of(trainer)
        if run is None:
            return digest_of_tensors((own, x) for own, (_, x) in counted.items())
        state = ModuleState(module, run.part, context_of(trainer, "LayerStatistics"))
        return digest_of_shards(
            state.shards(own, name, x.detach()) for own, (name, x) in counted.items()
        )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the hooks away."""
        if self._sums is not None:
            self._sums.close()
            self._sums = None
