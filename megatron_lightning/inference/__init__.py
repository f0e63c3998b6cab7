"""Text and scores by trained models, on any layout: the engine, the uncached sampling loop, and the
commands.
"""

from megatron_lightning.inference.engine import Engine
from megatron_lightning.inference.load import load_engine
from megatron_lightning.inference.options import EngineOptions
from megatron_lightning.inference.sampling import Sampling, sample
from megatron_lightning.inference.text_model import Completion, Score

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "Sampling",
    "Score",
    "load_engine",
    "sample",
]
