"""Options of masked datasets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from megatron_lightning.data.indexed.remote import BlockCache
from megatron_lightning.data.masked.mask_vocabulary import MaskVocabulary
from megatron_lightning.data.masked.masked_index import SentenceRules
from megatron_lightning.data.masked.masking import MaskingOptions
from megatron_lightning.data.pretraining.gpt_index import split_matrix
from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MaskedDatasetConfig:
    """Options of all splits of a masked dataset, by Megatron's names.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    sequence_length: int
    """Tokens of a sample, special tokens included."""
    tokenizer: Any
    """Tokenizer of the data, of this package or with the attributes of Megatron's."""
    random_seed: int = 1234
    """Seed of target lengths, order and masks."""
    split: str = "969,30,1"
    """Weights of train, validation and test, splitting the documents in file order."""
    vocab_size: int | None = None
    """Size of the model's vocabulary. A larger id in the data is an error. None: the tokenizer's
    size."""
    cache_dir: str | None = None
    """Folder of the index cache. None: ``{data_prefix}/cache``."""
    cache_bytes: int | None = None
    """Size of the blocks kept in ``cache_dir`` of files at a URL. None: without a limit."""
    masking_probability: float = 0.15
    """Fraction of masked tokens."""
    short_sequence_probability: float = 0.1
    """Probability of a sample with a random shorter target length."""
    masking_max_ngram: int = 3
    """Words of a masked n-gram at most."""
    masking_do_full_word: bool = True
    """Whether all pieces of a word are masked together."""
    masking_do_permutation: bool = False
    """Whether as many further tokens are permuted, and predicted as well. The tokens follow from
    seed and sample. Megatron draws the lengths of their n-grams from NumPy's global state, so that
    permuted samples are not equal to Megatron's."""
    masking_use_longer_ngrams: bool = False
    """Whether longer n-grams are more likely, instead of shorter ones."""
    masking_use_geometric_distribution: bool = False
    """Whether lengths of n-grams are geometric (SpanBERT)."""

    reserved_tokens: ClassVar[int] = 0
    """Special tokens of a sample."""

    def __post_init__(self) -> None:
        longest = self.sequence_length - self.reserved_tokens
        if longest < 2:
            raise ConfigError(
                f"sequence_length={self.sequence_length}: a sample has {self.reserved_tokens} "
                f"special tokens, and needs 2 more at least; set it to {self.reserved_tokens + 2} "
                "or more"
            )
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer is left out, and masks need its special tokens and words; set "
                "tokenizer_model"
            )
        if not 0 <= self.random_seed < 2**31 - 1:
            raise ConfigError(
                f"random_seed={self.random_seed} is no seed of the sample index; set it to 0 or "
                "more, below 2**31 - 1"
            )
        if not 0 < self.masking_probability < 1:
            raise ConfigError(
                f"masking_probability={self.masking_probability}: must be between 0 and 1; set it "
                "to 0.15"
            )
        if not 0 <= self.short_sequence_probability <= 1:
            raise ConfigError(
                f"short_sequence_probability={self.short_sequence_probability}: must be a "
                "probability; set it from 0 to 1"
            )
        if self.masking_max_ngram < 1:
            raise ConfigError(
                f"masking_max_ngram={self.masking_max_ngram}: must be a positive integer; set it "
                "to 1 or more"
            )
        for option in ("masking_do_permutation", "masking_use_longer_ngrams"):
            if self.masking_use_geometric_distribution and getattr(self, option):
                raise ConfigError(
                    "masking_use_geometric_distribution draws the lengths of n-grams, and "
                    f"{option} has other lengths; set one of the two to False"
                )
        split_matrix(self.split)

    @property
    def block_cache(self) -> BlockCache | None:
        """Folder of the blocks of files at a URL. None: ``cache_dir`` is not set."""
        return None if self.cache_dir is None else BlockCache(self.cache_dir, self.cache_bytes)

    @property
    def num_ids(self) -> int:
        """Size of the vocabulary."""
        return int(self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size)

    @cached_property
    def vocabulary(self) -> MaskVocabulary:
        """Special tokens and words of the tokenizer."""
        return MaskVocabulary.of(self.tokenizer)

    @property
    def masking(self) -> MaskingOptions:
        """Options of the choice of masked tokens."""
        names = [field.name for field in fields(MaskingOptions)]
        return MaskingOptions(**{name: getattr(self, name) for name in names})

    @property
    def min_sentences(self) -> int:
        """Sentences of a sample at least."""
        return 1

    @property
    def rules(self) -> SentenceRules:
        """Division of documents into samples."""
        longest = self.sequence_length - self.reserved_tokens
        return SentenceRules(longest, self.short_sequence_probability, self.min_sentences)

    @property
    def order(self) -> dict[str, object]:
        """Settings of the samples, as plain values, in Megatron's order."""
        names = [field.name for field in fields(MaskedDatasetConfig)]
        return {name: getattr(self, name) for name in names if "mask" in name or "short" in name}


@dataclass(frozen=True, kw_only=True)
class BertDatasetConfig(MaskedDatasetConfig):
    """Options of :class:`BertDataset`."""

    classification_head: bool = True
    """Whether a sample is a pair of segments, swapped with probability 0.5."""

    reserved_tokens: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary.need("cls", "sep", "mask", use="BertDataset")

    @property
    def min_sentences(self) -> int:
        """Sentences of a sample at least."""
        return 2 if self.classification_head else 1

    @property
    def order(self) -> dict[str, object]:
        """Settings of the samples, as plain values, in Megatron's order."""
        return {**super().order, "classification_head": self.classification_head}


@dataclass(frozen=True, kw_only=True)
class T5DatasetConfig(MaskedDatasetConfig):
    """Options of :class:`T5Dataset`. ``sequence_length`` is the encoder's."""

    sequence_length_decoder: int
    """Tokens of the decoder's input."""
    masking_max_ngram: int = 10
    masking_use_geometric_distribution: bool = True

    reserved_tokens: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length_decoder < 3:
            raise ConfigError(
                f"sequence_length_decoder={self.sequence_length_decoder}: a first token, a "
                "sentinel and a masked token do not fit; set it to 3 or more"
            )
        self.vocabulary.need("bos", "eos", "sentinels", use="T5Dataset")

    @property
    def order(self) -> dict[str, object]:
        """Settings of the samples, as plain values, in Megatron's order."""
        return {**super().order, "sequence_length_decoder": self.sequence_length_decoder}
