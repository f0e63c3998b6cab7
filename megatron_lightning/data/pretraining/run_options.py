"""Options of a run shared by the data modules over indexed files: sizes, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.data.order.batch_size import BatchSizeSchedule
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.data.text.tokenizers import Tokenizer, TokenizerType, load_tokenizer
from megatron_lightning.errors import ConfigError


@dataclass(frozen=True)
class NamedTokenizer:
    """A tokenizer, and how the user names it."""

    tokenizer: Tokenizer
    model: str
    type: TokenizerType

    @classmethod
    def load(cls, model: str | None, kind: TokenizerType) -> NamedTokenizer | None:
        """Load a tokenizer. None: there is no name. Bytes need no name."""
        if kind == "bytes":
            model = model or kind
        return None if model is None else cls(load_tokenizer(model, kind), str(model), kind)


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """Batch sizes and numbers of samples of a run.

    Raises:
        ConfigError: If a number is not positive, or the batch has no size or two.
    """

    batch_size: int | None
    global_batch_size: int | None
    batch_size_schedule: BatchSizeSchedule | None
    num_train_samples: int | None
    num_val_samples: int | None
    num_test_samples: int | None

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if isinstance(count, int) and count < 1:
                raise ConfigError(
                    f"{name}={count}: must be a positive integer; set it to 1 or more"
                )
        is_doubtful = (self.batch_size is None) == (self.global_batch_size is None)
        if is_doubtful and self.batch_size_schedule is None:
            raise ConfigError(
                f"batch_size is {self.batch_size} and global_batch_size is "
                f"{self.global_batch_size}. Set one of the two: samples of one data-parallel rank, "
                "or of all together."
            )

    @property
    def num_samples(self) -> dict[IndexSplit, int | None]:
        """Requested samples of each part. None: one epoch."""
        return {
            "train": self.num_train_samples,
            "valid": self.num_val_samples,
            "test": self.num_test_samples,
        }
