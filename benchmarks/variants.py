"""Variants that ``bench_step`` compares: the same GPT in several layouts, ours and Lightning's own.

Every variant trains the same model from the same weights on the same batches; that their losses
agree is checked. The peers get the model as their users would write it: ``fully_shard`` on every
layer for FSDP2, and for ``ModelParallelStrategy`` a DTensor plan with sequence parallelism and the
loss computed on sharded logits (Lightning's own tensor-parallel example).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from megatron_lightning.config import CompileScope, DataParallel, TransformerConfig
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.modules.language_model import Batch
from megatron_lightning.planning import flops
from megatron_lightning.strategies.megatron import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch, device and precision."""

    num_layers: int = 8
    hidden_size: int = 256
    num_heads: int = 8
    num_groups: int = 4
    ffn_size: int = 768
    vocab_size: int = 2048
    sequence: int = 512
    batch: int = 8
    """Samples of a global batch."""
    accelerator: str = "cpu"
    """Lightning's name of the device, ``"cpu"`` or ``"gpu"``."""
    precision: str = "32-true"
    """Lightning's name of the precision."""

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Floating-point operations of the model in a training step."""
        return flops(self.config, batch_size=self.batch, sequence_length=self.sequence)

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_groups,
            ffn_hidden_size=self.ffn_size,
            vocab_size=self.vocab_size,
            max_sequence_length=self.sequence,
            share_embeddings_and_output_weights=False,
        )


class FullyShardedGPT(GPTLightningModule):
    """FSDP2 as torch's own tutorial applies it: every layer, then the rest."""

    def configure_model(self) -> None:
        """Build the model and shard it."""
        if self.model is None:
            super().configure_model()
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.decoder.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)


class DTensorGPT(GPTLightningModule):
    """Tensor and sequence parallelism by DTensor styles; the loss stays sharded over the
    vocabulary.
    """

    def configure_model(self) -> None:
        """Build the model and distribute its parameters."""
        if self.model is None:
            super().configure_model()
            _distribute(self.model, self.device_mesh["tensor_parallel"])

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with loss_parallel():
            logits = self(batch["tokens"])  # DTensor [b, s, v], sharded over v
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss, torch.tensor(batch["labels"].numel())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with support for the sharded loss."""
        with loss_parallel():
            super().backward(loss, *args, **kwargs)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log the replicated loss as a plain tensor, as loggers need it."""
        super().log(
            name, value.full_tensor() if hasattr(value, "full_tensor") else value, *args, **kwargs
        )


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan; activations are [s, b, h], so the sequence is dim 0."""
    shard = Shard(0)
    for layer in model.decoder.layers.values():
        fc1 = layer.mlp.linear_fc1.weight
        # Gate and up are stacked, and a DTensor is sharded once: interleave them, so that every
        # rank has a shard of both.
        gate, up = (half.chunk(mesh.size()) for half in fc1.data.chunk(2))
        fc1.data.copy_(torch.cat([block for pair in zip(gate, up, strict=True) for block in pair]))
        plan = {
            "input_layernorm": SequenceParallel(sequence_dim=0),
            "self_attention": PrepareModuleInput(
                input_layouts=(shard, None), desired_input_layouts=(Replicate(), None)
            ),
            "self_attention.linear_qkv": ColwiseParallel(),
            "self_attention.linear_proj": RowwiseParallel(output_layouts=shard),
            "pre_mlp_layernorm": SequenceParallel(sequence_dim=0),
            "mlp": PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),)),
            "mlp.linear_fc1": ColwiseParallel(),
            "mlp.linear_fc2": RowwiseParallel(output_layouts=shard),
        }
        parallelize_module(layer, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "embedding.word_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=shard
            ),
            "decoder.final_layernorm": SequenceParallel(sequence_dim=0),
            "output_layer": ColwiseParallel(
                input_layouts=shard, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the model; its functions are importable, as a process receives it."""

    name: str
    size: int
    """Processes."""
    strategy: Callable[[Shape], Strategy]
    module: Callable[[TransformerConfig], pl.LightningModule] = GPTLightningModule
    data_size: int = 1
    """Data-parallel ranks."""
    stages: int = 1
    """Pipeline stages."""
    num_microbatches: int = 1
    ours: bool = False
    """Whether the strategy distributes the data itself, in the loader's order."""


def megatron(
    shape: Shape,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    num_microbatches: int = 1,
    data_parallel: DataParallel = "ddp",
    compile: CompileScope | None = None,
) -> Strategy:
    """Return our strategy."""
    samples = shape.batch // dp // num_microbatches
    return MegatronStrategy(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel=data_parallel,
        micro_batch_size=samples if num_microbatches > 1 else None,
        compile=compile,
    )


def ours(
    name: str,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    num_microbatches: int = 1,
    data_parallel: DataParallel = "ddp",
) -> Variant:
    """Return a layout of ours."""
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "num_microbatches": num_microbatches}
    return Variant(
        name=name,
        size=tp * pp * dp,
        strategy=partial(megatron, **sizes, data_parallel=data_parallel),
        data_size=dp,
        stages=pp,
        num_microbatches=num_microbatches,
        ours=True,
    )


def sharded(shape: Shape, *, data: int, tensor: int) -> Strategy:
    """Return Lightning's strategy for modules that are sharded in ``configure_model``."""
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


def ddp(shape: Shape) -> Strategy:
    """Return Lightning's data parallelism."""
    return DDPStrategy()


def single_device(shape: Shape) -> Strategy:
    """Return plain Lightning."""
    return SingleDeviceStrategy(torch.device("cuda:0" if shape.accelerator == "gpu" else "cpu"))


NUM_MICROBATCHES = 4

VARIANTS = {
    variant.name: variant
    for variant in (
        ours("single"),
        Variant(name="lightning-single", size=1, strategy=single_device),
        ours("dp2", dp=2),
        Variant(name="lightning-ddp2", size=2, strategy=ddp, data_size=2),
        ours("pp2", pp=2, num_microbatches=NUM_MICROBATCHES),
        ours("dp2-zero1", dp=2, data_parallel="zero1"),
        ours("dp2-fsdp", dp=2, data_parallel="fsdp"),
        Variant(
            name="lightning-fsdp2",
            size=2,
            strategy=partial(sharded, data=2, tensor=1),
            module=FullyShardedGPT,
            data_size=2,
        ),
        ours("tp2", tp=2),
        Variant(
            name="lightning-tp2",
            size=2,
            strategy=partial(sharded, data=1, tensor=2),
            module=DTensorGPT,
        ),
        ours("tp2-pp2", tp=2, pp=2, num_microbatches=NUM_MICROBATCHES),
    )
}
"""In the order of a round: variants that are compared run next to each other."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal that ``ours`` is at least ``ratio`` times as fast as ``peer``."""

    ours: str
    peer: str
    ratio: float | None
    """None: measured for information."""
    ideal: float = 1.0
    """Cost of the layout itself: the pipeline's bubble leaves m / (m + p - 1) of the time."""


GOALS = (
    Goal(ours="single", peer="lightning-single", ratio=0.98),
    Goal(ours="dp2", peer="lightning-ddp2", ratio=1.0),
    Goal(ours="tp2", peer="lightning-tp2", ratio=1.15),
    Goal(ours="pp2", peer="dp2", ratio=0.95, ideal=NUM_MICROBATCHES / (NUM_MICROBATCHES + 2 - 1)),
    Goal(ours="dp2-zero1", peer="lightning-ddp2", ratio=None),
    Goal(ours="dp2-zero1", peer="lightning-fsdp2", ratio=None),
    Goal(ours="dp2-fsdp", peer="lightning-fsdp2", ratio=None),
    Goal(ours="tp2-pp2", peer="tp2", ratio=None),
)
