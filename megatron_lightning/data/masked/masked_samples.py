"""Samples for encoders (BERT) and encoder-decoders (T5) from indexed files of sentences, equal to
the samples of Megatron's ``BERTMaskedWordPieceDataset`` and ``T5MaskedWordPieceDataset``.

Sample i is drawn from ``RandomState((random_seed + i) % 2**32)``: workers, ranks and resumes change
nothing.
"""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.read_ahead import Part, ReadAhead
from megatron_lightning.data.masked.mask_vocabulary import MaskVocabulary
from megatron_lightning.data.masked.masked_config import (
    BertDatasetConfig,
    MaskedDatasetConfig,
    T5DatasetConfig,
)
from megatron_lightning.data.masked.masked_index import LONG_SENTENCE, sample_rows
from megatron_lightning.data.masked.masking import Masked, Unmasked, mask_tokens
from megatron_lightning.data.pretraining.gpt_index import split_matrix, split_sequences
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.data.pretraining.index_cache import IndexCache, digest_of
from megatron_lightning.errors import ConfigError, DataError

Sample = dict[str, torch.Tensor]
_IGNORED = -1
_SPLITS: tuple[IndexSplit, ...] = ("train", "valid", "test")


def documents_of(
    indexed: IndexedDataset, config: MaskedDatasetConfig, index_split: IndexSplit
) -> npt.NDArray[np.int64]:
    """Return the first sentence of each document of a part of the split, and the end of the last
    [D + 1]. Reads only lengths.

    Raises:
        ConfigError: If the part has no weight.
        DataError: If no document of the part gives a sample.
    """
    bounds = split_matrix(config.split)[_SPLITS.index(index_split)]
    if bounds is None:
        raise ConfigError(
            f"split={config.split!r}: the {index_split} part has no weight; set it above 0"
        )
    documents = split_sequences(bounds, indexed.num_documents)
    if len(documents) == 0:
        raise DataError(
            f"{indexed.prefix}: the {index_split} part of split={config.split!r} gets none of "
            f"{indexed.num_documents} documents; give it a larger weight, or 0 to go without it"
        )
    # One more boundary than documents: the end of the last.
    boundaries = indexed.document_indices[documents[0] : documents[-1] + 2]
    if not config.rules.usable(boundaries, indexed.sequence_lengths).any():
        raise DataError(
            f"{indexed.prefix}: none of {len(documents)} documents of the {index_split} part has "
            f"{config.min_sentences} sentences or more without one above {LONG_SENTENCE} tokens; "
            "write sentences with `megatron-lightning preprocess --split-sentences`, or set "
            "classification_head to False"
        )
    return boundaries


class MaskedDataset(Dataset[Sample], ABC):
    """A split of an indexed file of sentences as masked samples.

    The sample index is cached under Megatron's name.

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes. A sequence of
            the file is a sentence.
        config: Options of all splits.
        index_split: Part of the documents to serve.
        num_samples: Number of samples at least, over as many epochs as needed. None: one epoch.

    Raises:
        DataError: If a file is missing or damaged, or no document gives a sample.
        ConfigError: If the split has no weight.
    """

    megatron_name: ClassVar[str]
    """Megatron's class, in the names of cached indices."""

    def __init__(
        self,
        data_prefix: str,
        config: Any,
        index_split: IndexSplit = "train",
        num_samples: int | None = None,
    ) -> None:
        self.config = config
        self.index_split = index_split
        self.num_samples = num_samples
        self.indexed = IndexedDataset(data_prefix, config.block_cache)
        self._read_ahead = ReadAhead(self.indexed)
        self._masking = config.masking
        self._vocabulary: MaskVocabulary = config.vocabulary
        self.sample_index = self._load_or_build()
        """First sentence, end, and target length of each sample [n, 3]."""

    @property
    def unique_description(self) -> str:
        """All inputs to the samples, in Megatron's format."""
        config = self.config
        fields: dict[str, object] = {
            "class": self.megatron_name,
            "dataset_path": self.indexed.prefix,
            "num_samples": self.num_samples,
            "index_split": self.index_split,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": split_matrix(config.split),
            "tokenizer": dict(getattr(config.tokenizer, "unique_identifiers", {})),
            **config.order,
        }
        return json.dumps(fields, indent=4)

    def _load_or_build(self) -> npt.NDArray[np.uint32 | np.uint64]:
        config = self.config
        boundaries = documents_of(self.indexed, config, self.index_split)
        folder = config.cache_dir or f"{self.indexed.prefix}/cache/{self.megatron_name}_indices"
        stem = f"{digest_of(self.unique_description)}-{self.megatron_name}"
        modified = self.indexed.index_file.stat().st_mtime
        cache = IndexCache(folder, stem, self.unique_description, modified)

        def build() -> dict[str, npt.NDArray[Any]]:
            lengths, seed = self.indexed.sequence_lengths, config.random_seed
            rows = sample_rows(boundaries, lengths, config.rules, self.num_samples, seed)
            return {"sample_index": rows}

        (found,) = cache.load_or_build(
            ("sample_index",), build, lambda arrays: arrays[0].ndim == 2 and len(arrays[0]) > 0
        )
        return found

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, index: int) -> Sample:
        """Return sample ``index``.

        Raises:
            IndexError: If there is no such sample.
            DataError: If the sample holds a token id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        self._read_ahead(index, len(self), self._parts)
        sentences = [self.indexed.get(*part).astype(np.int64) for part in self._parts(index)]
        self._check_ids(sentences, index)
        target = int(self.sample_index[index, 2])
        random = np.random.RandomState((self.config.random_seed + index) % 2**32)
        sample = self._sample([sentence.tolist() for sentence in sentences], target, random)
        return {name: torch.as_tensor(values) for name, values in sample.items()}

    @abstractmethod
    def _sample(
        self, sentences: list[list[int]], target: int, random: np.random.RandomState
    ) -> dict[str, Any]:
        """Return the entries of a sample."""

    def _replacement(self, random: np.random.RandomState) -> int | None:
        """Draw the token in the place of a masked token. None: the token stays."""
        return self._vocabulary.mask

    def _parts(self, index: int) -> list[Part]:
        begin, end, _ = self.sample_index[index].tolist()
        return [(sentence, 0, None) for sentence in range(begin, end)]

    def _check_ids(self, sentences: list[npt.NDArray[np.int64]], index: int) -> None:
        limit = min(self.config.num_ids, len(self._vocabulary.continues))
        for number, sentence in enumerate(sentences, int(self.sample_index[index, 0])):
            wrong_ids = sentence[(sentence < 0) | (sentence >= limit)]
            if len(wrong_ids):
                raise DataError(
                    f"{self.indexed.prefix}.bin: sentence {number} has id {wrong_ids[0]}, but the "
                    f"vocabulary has {limit} ids: the data were made with another tokenizer; set "
                    "tokenizer_model and vocab_size to that one's, or run preprocess again"
                )

    def _words(self, tokens: list[int]) -> list[list[int]]:
        """Return the positions of each word, or of each piece. Special tokens are no words."""
        vocabulary, masks_words = self._vocabulary, self.config.masking_do_full_word
        words: list[list[int]] = []
        for position, token in enumerate(tokens):
            if token in (vocabulary.cls, vocabulary.sep):
                continue
            if masks_words and words and vocabulary.continues[token]:
                words[-1].append(position)
            else:
                words.append([position])
        return words

    def _padded(self, ids: list[int], length: int, fill: int = 0) -> npt.NDArray[np.int64]:
        padded = np.full(length, fill, np.int64)
        padded[: len(ids)] = ids
        return padded

    def _with_mask(self, ids: list[int], length: int) -> tuple[Any, Any]:
        """Return padded ids, and which are no padding. As in Megatron, a padding id among the ids
        counts as padding.
        """
        pad = self._vocabulary.pad
        padded = self._padded(ids, length, pad)
        is_padding = padded == pad
        padded[is_padding] = 0
        return padded, (~is_padding).astype(np.int64)

    def __reduce__(self) -> tuple[object, ...]:
        # a loader's worker maps the files again instead of receiving their bytes
        return (type(self), (self.indexed.prefix, self.config, self.index_split, self.num_samples))


class BertDataset(MaskedDataset):
    """Pairs of segments with masked words, as samples
    ``{"text", "types", "labels", "padding_mask", "loss_mask": int64 [s], "is_random", "truncated":
    int64 []}``.

    ``labels`` are -1 where ``loss_mask`` is 0. ``is_random`` tells that the segments are swapped.
    Of the masked tokens, 80 % become the mask token, 10 % a random token, and 10 % stay
    (https://arxiv.org/abs/1810.04805, section 3.1). See :class:`MaskedDataset`.
    """

    megatron_name = "BERTMaskedWordPieceDataset"
    config: BertDatasetConfig

    def _sample(
        self, sentences: list[list[int]], target: int, random: np.random.RandomState
    ) -> dict[str, Any]:
        vocabulary, length = self._vocabulary, self.config.sequence_length
        # The order of draws follows Megatron-Core: segments, truncation, masks.
        first, second, is_swapped = self._segments(sentences, random)
        first, second, is_truncated = _trimmed(first, second, target, random)
        cls, sep = vocabulary.cls or 0, vocabulary.sep or 0
        tokens = [cls, *first, sep]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, sep]
            types += [1] * (len(second) + 1)
        unmasked = Unmasked(tokens, self._words(tokens), target)
        masked = mask_tokens(unmasked, self._masking, random, self._replacement)
        text, padding_mask = self._with_mask(masked.tokens, length)
        labels, loss_mask = np.full(length, _IGNORED, np.int64), np.zeros(length, np.int64)
        positions = list(masked.labels)
        labels[positions], loss_mask[positions] = list(masked.labels.values()), 1
        return {
            "text": text,
            "types": self._padded(types, length),
            "labels": labels,
            "is_random": int(is_swapped),
            "padding_mask": padding_mask,
            "loss_mask": loss_mask,
            "truncated": int(is_truncated),
        }

    def _segments(
        self, sentences: list[list[int]], random: np.random.RandomState
    ) -> tuple[list[int], list[int], bool]:
        """Return both segments, and whether they are swapped."""
        pivot, is_swapped = len(sentences), False
        if self.config.classification_head:
            pivot = 1
            if len(sentences) >= 3:
                pivot = int(random.randint(low=1, high=len(sentences)))
            is_swapped = random.random_sample() < 0.5
        first = [token for sentence in sentences[:pivot] for token in sentence]
        second = [token for sentence in sentences[pivot:] for token in sentence]
        return (second, first, True) if is_swapped else (first, second, False)

    def _replacement(self, random: np.random.RandomState) -> int | None:
        if random.random_sample() < 0.8:
            return self._vocabulary.mask
        if random.random_sample() >= 0.5:
            ids = self._vocabulary.ids
            return ids[random.randint(0, len(ids))]
        return None


class T5Dataset(MaskedDataset):
    """Texts with spans replaced by sentinels, as samples ``{"text_enc", "enc_mask": int64 [s],
    "text_dec", "labels", "loss_mask", "dec_mask": int64 [t], "truncated": int64 []}``.

    The decoder repeats each sentinel with its span (https://arxiv.org/abs/1910.10683, section
    3.1.4). ``labels`` are -1 behind the end. Masking ends when the sentinels or the decoder's
    positions do, with a warning, where Megatron stops with an error. See :class:`MaskedDataset`.
    """

    megatron_name = "T5MaskedWordPieceDataset"
    config: T5DatasetConfig

    def _sample(
        self, sentences: list[list[int]], target: int, random: np.random.RandomState
    ) -> dict[str, Any]:
        vocabulary, config = self._vocabulary, self.config
        tokens = [token for sentence in sentences for token in sentence]
        is_truncated, tokens = len(tokens) > target, tokens[:target]

        unmasked = Unmasked(tokens, self._words(tokens), target)
        masked = mask_tokens(unmasked, self._masking, random, self._replacement, self._has_room)
        source, spans = self._divided(masked, tokens)
        text_enc, enc_mask = self._with_mask(source, config.sequence_length)
        text_dec, dec_mask = self._with_mask(
            [vocabulary.bos or 0, *spans], config.sequence_length_decoder
        )
        dec_mask[0] = 1  # also where padding is the first token, as of T5's own tokenizer
        loss_mask = np.zeros(config.sequence_length_decoder, np.int64)
        loss_mask[: len(spans) + 1] = 1
        labels = [*spans, vocabulary.eos or 0]
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": self._padded(labels, config.sequence_length_decoder, _IGNORED),
            "loss_mask": loss_mask,
            "truncated": int(is_truncated),
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
        }

    def _has_room(self, num_spans: int, num_tokens: int) -> bool:
        """Return whether the sentinels and the decoder's positions suffice. Warn if not."""
        num_sentinels, length = (
            len(self._vocabulary.sentinels),
            self.config.sequence_length_decoder,
        )
        if num_spans > num_sentinels:
            limit = f"{num_sentinels} sentinels of the tokenizer {self._vocabulary.origin}"
            remedy = "set tokenizer_model to a tokenizer with more <extra_id_…> tokens"
        elif 1 + num_spans + num_tokens > length:
            limit = f"sequence_length_decoder={length}"
            remedy = "set sequence_length_decoder higher"
        else:
            return True
        # The text is equal for all samples, so that Python shows it once.
        warnings.warn(
            f"{self.indexed.prefix}: some samples have fewer masked tokens than "
            f"masking_probability={self.config.masking_probability}, because masking ends with the "
            f"{limit}; {remedy}, or masking_probability lower",
            stacklevel=2,
        )
        return False

    def _divided(self, masked: Masked, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the text with sentinels, and the sentinels with their spans."""
        source: list[int] = []
        spans: list[int] = []
        begin = 0
        for positions, sentinel in zip(masked.spans, self._vocabulary.sentinels, strict=False):
            source += [*masked.tokens[begin : positions[0]], sentinel]
            spans += [sentinel, *(tokens[position] for position in positions)]
            begin = positions[-1] + 1
        return [*source, *masked.tokens[begin:]], spans


def _trimmed(
    first: list[int], second: list[int], target: int, random: np.random.RandomState
) -> tuple[list[int], list[int], bool]:
    """Return both segments with ``target`` tokens at most, and whether tokens are missing. Tokens
    leave the longer segment, at a random end.
    """
    bounds = [[0, len(first)], [0, len(second)]]
    is_truncated = len(first) + len(second) > target
    for _ in range(len(first) + len(second) - target):
        sizes = [end - begin for begin, end in bounds]
        longer = bounds[0] if sizes[0] > sizes[1] else bounds[1]
        if random.random_sample() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])], is_truncated
