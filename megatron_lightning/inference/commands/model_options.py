"""Options of the commands that write text: a trained model, its tokenizer, layout and engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.parallel.grid.layout import ParallelLayout

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A trained model, its tokenizer, layout and engine. Plain values."""

    checkpoint: str
    """Checkpoint directory, plain Lightning .ckpt file, Hugging Face folder, or Hub id."""
    adapters: str | None = None
    """Folder of peft, or checkpoint, with adapters for the model."""
    tokenizer_model: str | None = None
    """The tokenizer of the training data. Default: the tokenizer saved with the model."""
    tokenizer_type: TokenizerType = "sentencepiece"
    """sentencepiece, huggingface, json, bytes, null or class_path."""
    tensor_model_parallel_size: int = 1
    """Ranks to split each layer's matrices over."""
    pipeline_model_parallel_size: int = 1
    """Ranks to split the layers over, as stages."""
    virtual_pipeline_model_parallel_size: int = 1
    """Stages on each pipeline rank."""
    pipeline_schedule: str | list[str] = "auto"
    """Schedule as in training. Determines the stages of each rank."""
    expert_model_parallel_size: int = 1
    """Ranks to divide the experts over. Experts use the tensor parallel ranks: set
    expert_tensor_parallel_size to 1, or reduce expert_tensor_parallel_size by the same factor."""
    expert_tensor_parallel_size: int | None = None
    """Ranks to split each expert's matrices over. Default: the tensor parallel size."""
    device: str = "auto"
    """cpu, cuda, or auto (cuda if available)."""
    dtype: Dtype = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""
    max_tokens: int = 512
    """Tokens of a step over all texts. Longer prompts are computed in chunks."""
    max_requests: int = 64
    """Texts computed at the same time. Further texts wait."""
    cache_gib: float = 1.0
    """GiB for keys and values on each rank, at most."""
    draft_tokens: int = 0
    """Tokens drafted for each text in a step, by as many layers of multi-token prediction, and
    verified by the model. The texts are the same. 0: no drafts."""
    prefix_cache: bool = True
    """Keep keys of ended texts, as long as there is room, for texts that begin alike. The texts are
    the same."""

    @property
    def layout(self) -> ParallelLayout:
        """Sizes of the layout.

        Raises:
            ConfigError: If a size cannot work.
        """
        return ParallelLayout(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            sequence_parallel=False,  # rows are short: gathers would cost more than the savings
        )

    @property
    def engine(self) -> EngineOptions:
        """Sizes of the engine.

        Raises:
            ConfigError: If a size cannot work.
        """
        return EngineOptions(
            max_tokens=self.max_tokens,
            max_requests=min(self.max_requests, self.max_tokens),
            cache_gib=self.cache_gib,
            draft_tokens=self.draft_tokens,
            prefix_cache=self.prefix_cache,
        )
