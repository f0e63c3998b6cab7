"""Text and scores by trained models, on any layout: the engine, the uncached sampling loop, and the
commands.
"""

from megatron_lightning.inference.engine import Completion, Engine, Score
from megatron_lightning.inference.load import load_engine
from megatron_lightning.inference.options import EngineOptions
from megatron_lightning.inference.sampling import Sampling, sample

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "Sampling",
    "Score",
    "load_engine",
    "sample",
]
