"""Tensors of a rank's part as shards of the full module's, for checkpoints and inference.

A checkpoint names tensors as in ``checkpoint.naming``, with ``state_dict.<name>`` for the module's
tensors. Of a tied pair only the owner is written. A plain checkpoint may also contain the copy, and
is read as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.part import Part
from megatron_lightning.checkpoint import CheckpointSource, TensorShards, load_sharded
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.reading.memory_source import MemorySource
from megatron_lightning.checkpoint.reading.stored_tensor import StoredTensor
from megatron_lightning.errors import CheckpointError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.layers.styles import VocabParallel
from megatron_lightning.optim.fsdp.sharded_unit import local_shard
from megatron_lightning.optim.gradients.parameter_shard import MainShard
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import Shape, ShardSpec, is_writer
from megatron_lightning.parallel.shards.stored_weight import stored_part

_MODULE = "state_dict."


@dataclass(frozen=True)
class ModuleState:
    """The state of a rank's part of a module, as shards of global tensors."""

    module: nn.Module
    part: Part
    context: ParallelContext
    main: Mapping[str, MainShard] = field(default_factory=dict)
    """Name -> main params of a parameter stored as quantized data."""

    def shards(self, saved_as: str, name: str, tensor: Tensor) -> TensorShards:
        """Describe the boxes of a global tensor on this rank, and the ranks with the same boxes.

        Args:
            saved_as: Name in a checkpoint.
            name: Parameter or buffer of the module behind ``tensor``, which may be a copy.
            tensor: Local values: the tensor-parallel shard, or with FSDP2 rows of the
                tensor-parallel shard.
        """
        if name in self.main and is_quantized(tensor.dtype):
            spec, main = self.spec(name, tensor), self.main[name]
            main_shards, replicas = main.shards(spec), main.groups.replicas
            writes = is_writer(spec, self.context)
            return TensorShards(
                saved_as, spec.global_shape, main.dtype, main_shards, writes, replicas
            )
        return self.copy_shards(saved_as, name, tensor)

    def copy_shards(self, saved_as: str, name: str, tensor: Tensor) -> TensorShards:
        """Describe the boxes of a tensor as :meth:`shards` does, for values that are not quantized
        data.
        """
        spec = self.spec(name, tensor)
        writes = is_writer(spec, self.context)
        if isinstance(tensor, DTensor) and self.part.units is not None:
            local_tensor, box = local_shard(tensor)
            replicas = self.part.units.groups[spec.data_axes].replicas
            return TensorShards.local(
                saved_as, spec.part(box), local_tensor, writes=writes, replicas=replicas
            )
        return TensorShards.local(
            saved_as, spec, tensor, writes=writes, replicas=self.context.axis(spec.data_axes)
        )

    def spec(self, name: str, tensor: Tensor) -> ShardSpec:
        """Return how a tensor of a parameter or buffer is sharded."""
        spec = self._declared(name)
        if spec is not None and spec.local_shape == tuple(tensor.shape):
            return spec
        return ShardSpec.replicated(
            tensor.shape, partial_over=() if self.part.in_unit(name) else ("pp",)
        )

    def _declared(self, name: str) -> ShardSpec | None:
        """Return the spec of a parameter. None: no spec.

        If a tensor has several names on this rank (the owner's or copies'), a single name has the
        spec.
        """
        specs, tied = self.part.specs, self.part.tied
        owner = tied.get(name, name)
        copies = (copy for copy, target in tied.items() if target == owner)
        return next((specs[alias] for alias in (name, owner, *copies) if alias in specs), None)

    # ----------------------------------------------------------------------------------------- save

    def module_shards(self, checkpoint: dict[str, Any]) -> list[TensorShards]:
        """Move the tensors out of ``checkpoint["state_dict"]``. All ranks call this.

        Other entries of the dict (extra states of layers) stay, merged over the pipeline ranks.
        """
        state = checkpoint.get("state_dict")
        if state is None:
            return []
        ranks = self.context.pp.all_gather_object(
            {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        )
        checkpoint["state_dict"] = {
            name: shards for rank in reversed(ranks) for name, shards in rank.items()
        }
        return [
            self.shards(_MODULE + name, name, tensor)
            for name, tensor in state.items()
            if isinstance(tensor, Tensor) and name not in self.part.tied
        ]

    def tied_shards(self) -> list[TensorShards]:
        """Return this rank's tied copies under the owners' names, for ranks without the owners'
        shards.
        """
        local_state, tied = self.module.state_dict(), self.part.tied
        return [
            self.shards(_MODULE + tied[name], name, local_state[name])
            for name in tied
            if name in local_state
        ]

    # ----------------------------------------------------------------------------------------- load

    def stored_tensors(self, source: CheckpointSource) -> dict[str, StoredTensor]:
        """Return the full module's tensors in a checkpoint, in the module's order. Each tensor is
        read at the first computation.
        """
        stored = [n.removeprefix(_MODULE) for n in source.tensors() if n.startswith(_MODULE)]
        tied = {**(source.state().get(OWN) or {}).get("tied", {}), **self.part.tied}
        saved_as = {copy: owner for copy, owner in tied.items() if owner in stored}
        saved_as |= {name: name for name in stored}
        place = {name: position for position, name in enumerate(self.part.names)}
        ordered = sorted(saved_as, key=lambda name: place.get(name, len(place)))
        return {name: StoredTensor.of(source, _MODULE + saved_as[name]) for name in ordered}

    def edited(
        self, source: CheckpointSource | None, state_dict: Mapping[str, Any]
    ) -> CheckpointSource:
        """Return a checkpoint with the module's tensors replaced by the tensors of a state dict.
        All ranks call this.

        Args:
            source: The checkpoint, if any.
            state_dict: Full tensors, or such as :meth:`stored_tensors` returns, by name.

        Raises:
            CheckpointError: On every rank, if the ranks' names differ.
        """
        tensors = {
            _MODULE + name: value
            for name, value in sorted(state_dict.items())
            if isinstance(value, Tensor)
        }
        # Reading is collective by name: ranks with other names would wait for each other.
        marks = self.context.axis("world").all_gather_object(
            zlib.crc32(repr(list(tensors)).encode())
        )
        if len({*marks}) > 1:
            raise CheckpointError(
                "checkpoint['state_dict'] has other names on some ranks. on_load_checkpoint runs "
                "on every rank, and sees the names of the full model there: change it alike on "
                "all of them."
            )
        return MemorySource(source, tensors, replaced=_MODULE)

    def load_module(
        self,
        source: CheckpointSource,
        *,
        prefix: str = _MODULE,
        strict: bool = True,
        left_out: Set[str] = frozenset(),
    ) -> dict[str, Tensor]:
        """Read this rank's part into the module's own tensors, and return the tensors. All ranks
        call this.

        Args:
            source: The checkpoint.
            prefix: Precedes the module's names in the checkpoint.
            strict: Whether missing and unexpected names are errors.
            left_out: Names missing from the checkpoint on purpose. Their tensors stay unchanged.

        Raises:
            CheckpointError: On every rank, for missing, unexpected, misshaped or damaged tensors.
        """
        local_tensors, stored = self.local_tensors(), source.tensors()
        for name, tensor in local_tensors.items():
            if name not in left_out and stored_part(tensor) is not None:
                raise CheckpointError(
                    f"{name} is kept as quantized data (base of LoRA), which is made of a folder's "
                    "or of initial values, and the checkpoint holds values of it. Export the "
                    "checkpoint (megatron-lightning convert export), and begin from the folder."
                )
        # Shards of the module's own memory: values are read in place, without a second copy.
        shards = [
            self.shards(prefix + self._saved_as(name, prefix, stored), name, tensor)
            for name, tensor in local_tensors.items()
            if name not in left_out
        ]
        # Equal to the owner: expected in the checkpoint, and not read on ranks without the copy.
        for copy in self.part.tied:
            info = stored.get(prefix + copy)
            if info is not None:
                shards.append(TensorShards(prefix + copy, info.shape, info.dtype, []))
        load_sharded(source, shards, prefix=prefix, strict=strict, group=self.context.axis("world"))
        return local_tensors

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors in the module's state."""
        return {
            name: value
            for name, value in self.module.state_dict().items()
            if isinstance(value, Tensor)
        }

    def _saved_as(self, name: str, prefix: str, stored: Mapping[str, TensorInfo]) -> str:
        """Return the name of a tensor in a checkpoint. For a tied copy the name may be the
        owner's.
        """
        return name if prefix + name in stored else self.part.tied.get(name, name)

    def vocabulary_shapes(self) -> dict[str, Shape]:
        """Return the global shapes of the parameters over the vocabulary, by their own and their
        owners' names.

        A declared plan has a :class:`VocabParallel` row for their module, with any number of ranks.
        """
        specs, tied = self.part.specs, self.part.tied
        shapes = {}
        for path, own_plan in self.part.plans.declared.items():
            prefix = f"{path}." if path else ""
            for name in (name for name in {**specs, **tied} if name.startswith(prefix)):
                owner = tied.get(name, name)
                spec = self._declared(name)
                style = own_plan.style_of(name.removeprefix(prefix).rpartition(".")[0])
                if spec is not None and isinstance(style, VocabParallel):
                    shapes[name] = shapes[owner] = spec.global_shape
        return shapes
