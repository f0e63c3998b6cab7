"""Text and scores by trained models, on any layout: the engine, the uncached sampling loop, and the
commands.
"""

from megatron_lightning.inference.commands.load import load_engine
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.inference.engine.text_model import Completion, Score
from megatron_lightning.inference.engine.uncached_loop import Sampling, sample

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "Sampling",
    "Score",
    "load_engine",
    "sample",
]
