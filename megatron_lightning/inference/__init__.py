"""Text generation with a trained model, on any layout: the sampling loop, the model, and the
command that joins them.
"""

from megatron_lightning.inference.sampling import Sampling, sample

__all__ = ["Sampling", "sample"]
