"""Text from a trained model, on any layout: a sampling loop, the model behind it, and the two joined."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.inference.sampling import Sampling, sample

__all__ = ["Sampling", "sample"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Sampling": "megatron_lightning.inference.sampling",
        "sample": "megatron_lightning.inference.sampling",
    },
)
