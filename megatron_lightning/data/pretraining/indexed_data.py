"""Data of indexed files: blends, splits, the order of a run, and loaders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from megatron_lightning.config.global_batch import replica_batch_size
from megatron_lightning.data.indexed.identity import content_digest
from megatron_lightning.data.indexed.indexed_files import IndexedDataset
from megatron_lightning.data.indexed.sidecar import check_tokenizer
from megatron_lightning.data.order.batch_size import ScheduledBatchSampler
from megatron_lightning.data.order.resume_order import OnChangedData, changed_rows, describe_changes
from megatron_lightning.data.order.skipped import SkippedSamples
from megatron_lightning.data.pretraining.blended import BlendedDataset, DataSpec, NamedDatasets
from megatron_lightning.data.pretraining.continued import (
    ContinuedBlend,
    Make,
    Phase,
    describe_phase,
    goes_on,
    next_phase,
    train_state,
)
from megatron_lightning.data.pretraining.gpt_samples import IndexSplit
from megatron_lightning.data.pretraining.indexed_options import IndexedOptions
from megatron_lightning.data.pretraining.run_options import NamedTokenizer, RunSizes
from megatron_lightning.data.pretraining.stage_parts import parts_of_stage
from megatron_lightning.data.run_data import Batch, RunData
from megatron_lightning.errors import ConfigError


class IndexedData(RunData):
    """Samples of indexed files in a fixed order, so that the number of consumed samples is the
    position in the data. Subclasses make the data sets.

    Args:
        config: Options of all splits of a data set: a frozen dataclass with ``sequence_length``,
            ``random_seed``, ``split``, ``vocab_size``, ``num_ids`` and ``block_cache``.
        data_prefix: Data sets. See :class:`PretrainOptions`.
        options: The user's options.
        sizes: Batch sizes and numbers of samples.
        tokenizer: The tokenizer with its file or name, and type. None: unknown.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    def __init__(
        self,
        config: Any,
        data_prefix: Any,
        options: IndexedOptions,
        *,
        sizes: RunSizes,
        tokenizer: NamedTokenizer | None,
    ) -> None:
        super().__init__(options.num_workers, reading_thread=options.reading_thread)
        self.on_changed_data: OnChangedData = options.on_changed_data
        self.skip_samples = [list(r) for r in SkippedSamples(options.skip_samples or ()).ranges]
        """Samples skipped by training."""
        self.batch_size_schedule = sizes.batch_size_schedule
        self.data = DataSpec.parse(data_prefix)
        if not self.data.is_split and options.split is not None:
            raise ConfigError(
                f"split={options.split!r} beside data_prefix with train, validation and test, each "
                "of which reads all documents of its own data: leave split out, or set split=null "
                "over the value of a recipe"
            )
        self.data_prefix = data_prefix
        self.global_batch_size = sizes.global_batch_size
        self._batch_size = sizes.batch_size
        self._named = tokenizer
        self.tokenizer = None if tokenizer is None else tokenizer.tokenizer
        self.config = config
        self._num_samples = sizes.num_samples
        self._descriptions: dict[str, Mapping[str, Any]] = {}
        self._datasets: dict[IndexSplit, Any] = {}

    @abstractmethod
    def make_dataset(
        self, prefix: str, config: Any, name: IndexSplit, num_samples: int | None
    ) -> Any:
        """Return the data set of a prefix."""

    @abstractmethod
    def check_part(
        self, indexed: IndexedDataset, config: Any, name: IndexSplit, num_samples: int | None
    ) -> None:
        """Check that a part of the split has samples, by the lengths of sequences alone.

        Raises:
            ConfigError: If the part has no weight.
            DataError: If the part has no sample.
        """

    def order_settings(self) -> Mapping[str, Any]:
        """Return further settings of the order, as plain values."""
        return {}

    @property
    def batch_size(self) -> int:
        """Samples of a batch on a data-parallel rank. With ``global_batch_size`` known from the
        Trainer's setup on.

        Raises:
            ConfigError: If the ranks do not divide the global batch.
        """
        if self._batch_size is not None or self.global_batch_size is None:
            return self._batch_size or 1
        return replica_batch_size(
            self.global_batch_size, self._num_replicas(), self._num_accumulated()
        )

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return int(self.config.sequence_length)

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary. None if neither the setting nor a tokenizer gives a size."""
        size: int | None = self.config.num_ids
        return size

    def check_files(self, stage: str) -> None:
        """Check that the data suffice for ``stage``, before the strategy starts a process, without
        building indices.

        Raises:
            ConfigError: If there is no part to train on, or the only part read by ``stage`` is
                empty.
            DataError: If the data cannot be read, or a part of the split has too few tokens.
        """
        self._check_end_of_document()
        # A subclass may create the files in prepare_data.
        if type(self).prepare_data is IndexedData.prepare_data:
            for name, num_samples in self._parts(stage).items():
                for spec in self.data.blends(name):
                    single = num_samples if spec.is_single else None
                    for prefix in spec.prefixes:
                        self.check_part(self._indexed(prefix), self._split_of(name), name, single)
                        self._check_tokenizer(prefix)

    def prepare_data(self) -> None:
        """Build the index cache. Lightning calls this once on every node."""
        self._open(self._stage())

    def setup(self, stage: str) -> None:
        """Map the data and their indices into memory."""
        self._datasets.update(self._open(stage))

    def train_dataset(self) -> Any:
        """Return the training samples in the order of a fit. ``setup`` must have run."""
        return self._datasets["train"]

    def train_prefixes(self) -> list[str]:
        """Return the prefixes of the training data."""
        return list(self.data.blends("train")[0].prefixes)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the order of training samples, as plain values."""
        consumed = self._consumed_samples()
        return {
            "order": self._order(),
            "files": self.train_prefixes(),
            "consumed_samples": consumed,
            **self._positions(consumed),
            "skip_samples": self.skip_samples,
        }

    def _positions(self, consumed: int | None) -> dict[str, Any]:
        """Return the samples read from each data set."""
        return train_state(self._datasets.get("train"), self._contents(), consumed)

    @cached_property
    def _tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer. Made once, since the rules of a large vocabulary take long."""
        return None if self.tokenizer is None else self.tokenizer.identity[:16]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed fit reads the samples in the checkpoint's order.

        Raises:
            CheckpointError: If the order has changed, unless ``on_changed_data`` accepts the
                change.
        """
        if self._stage() != "fit":
            return
        order, saved_order = self._order(), state_dict["order"]
        if state_dict.get("phase") is not None:
            self._begin(Phase(**state_dict["phase"]))
        restarts = self.on_changed_data == "restart"
        # Three answers to changed data: continue each data set, start over, or read on at the
        # position.
        if goes_on(self.on_changed_data, order, saved_order):
            blend = self._begin(
                next_phase(state_dict, state_dict["consumed_samples"], restarts=restarts)
            )
            warning: str | None = describe_phase(
                blend, self.data.blends("train")[0], state_dict, restarts=restarts
            )
        else:
            warning = describe_changes(
                order,
                saved_order,
                on_changed_data=self.on_changed_data,
                consumed_samples=state_dict["consumed_samples"],
                rows=self._changed_rows(order, state_dict),
            )
        if warning is not None:
            self._warn(warning)
        # Ranges skipped by the run and ranges named now both stay skipped.
        all_skipped = SkippedSamples([*self.skip_samples, *state_dict.get("skip_samples", [])])
        self.skip_samples = [list(r) for r in all_skipped.ranges]

    def _changed_rows(
        self, order: Mapping[str, Any], state_dict: Mapping[str, Any]
    ) -> list[str] | None:
        """Return the differences to the checkpoint's order, data set by data set."""
        if "content" not in order:  # random samples
            return None
        names_there = state_dict.get("files", [])
        return changed_rows(order, state_dict["order"], self.train_prefixes(), names_there)

    def _begin(self, phase: Phase) -> ContinuedBlend:
        """Read the current training data from a position of the run on."""
        (spec,) = self.data.blends("train")
        size = self._num_samples["train"]
        blend = ContinuedBlend(spec, self._contents(), size, phase, self._make("train"))
        self._datasets["train"] = blend
        return blend

    def _contents(self) -> list[str]:
        """Return the digest of each training data set."""
        return [
            self._described(prefix)["content"] for prefix in self.data.blends("train")[0].prefixes
        ]

    def _order(self) -> dict[str, Any]:
        (spec,) = self.data.blends("train")
        rows = [self._described(prefix) for prefix in spec.prefixes]
        counts: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if spec.is_single:
            counts = {name: values[0] for name, values in counts.items()}
        else:
            counts["weights"] = None if spec.weights is None else list(spec.weights)
        # Ends of documents, padding and texts depend on the tokenizer, if there is one.
        tokenizer = {} if self.tokenizer is None else {"tokenizer": self._tokenizer_digest}
        return {
            "sequence_length": self.sequence_length,
            "seed": self.config.random_seed,
            "split": self._split_of("train").split,
            "num_train_samples": self._num_samples["train"],
            **self.order_settings(),
            **tokenizer,
            **counts,
        }

    def _described(self, prefix: str) -> Mapping[str, Any]:
        """Return documents, tokens and digest of a data set, read once."""
        if prefix not in self._descriptions:
            indexed = self._indexed(prefix)
            self._descriptions[prefix] = {
                "documents": indexed.num_documents,
                "tokens": int(indexed.num_tokens),
                "content": content_digest(prefix, self.config.block_cache),
            }
        return self._descriptions[prefix]

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of the validation sets, in the order of ``validation_set`` in a batch."""
        return self.data.names

    def _split_of(self, name: IndexSplit) -> Any:
        """Return the options of a part. A part with separate data has all documents."""
        split = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}[name]
        return self.config if self.data.is_split else replace(self.config, split=split)

    def _parts(self, stage: str) -> dict[IndexSplit, int | None]:
        """Return the requested samples of the parts read by ``stage``."""
        return parts_of_stage(stage, self.data, self.config.split, self._num_samples)

    def _make(self, name: IndexSplit) -> Make:
        """Return the factory of a part's data sets."""
        vocab_size = self.config.vocab_size
        if self.vocab_size is None:
            vocab_size = self._model_vocabulary()
        self._check_end_of_document()
        config = replace(self._split_of(name), vocab_size=vocab_size)

        def make(prefix: str, num_samples: int | None, pass_number: int = 0) -> Any:
            seed = (config.random_seed + pass_number) % 2**32
            return self.make_dataset(prefix, replace(config, random_seed=seed), name, num_samples)

        return make

    def _model_vocabulary(self) -> int | None:
        """Return the vocabulary of the model, if a ``TransformerConfig`` says it."""
        return self._model().vocab_size

    def _check_end_of_document(self) -> None:
        """Check that the model has the id of the end of a document. The padding needs no id of the
        model: samples have the id 0 in its place.

        Raises:
            ConfigError: If the id is outside of the vocabulary.
        """
        sizes = [size for size in (self.config.vocab_size, self._model_vocabulary()) if size]
        if self.tokenizer is None or not sizes or self.tokenizer.eod < min(sizes):
            return
        raise ConfigError(
            f"the tokenizer's eod has id {self.tokenizer.eod}, and the vocabulary of the model has "
            f"{min(sizes)} ids. Set vocab_size to {self.tokenizer.eod + 1} or more, or "
            "tokenizer_model to the tokenizer of the data."
        )

    def _open(self, stage: str) -> dict[IndexSplit, Any]:
        def opened(name: IndexSplit, count: int | None) -> Any:
            for prefix in {prefix for spec in self.data.blends(name) for prefix in spec.prefixes}:
                self._check_tokenizer(prefix)
            make, short = self._make(name), "val" if name == "valid" else name
            datasets = [
                make(spec.prefixes[0], count)
                if spec.is_single
                else BlendedDataset(spec, count, make, short)
                for spec in self.data.blends(name)
            ]
            return NamedDatasets(datasets) if name == "valid" and self.data.names else datasets[0]

        return {name: opened(name, count) for name, count in self._parts(stage).items()}

    def _indexed(self, prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, self.config.block_cache)

    def _check_tokenizer(self, prefix: str) -> None:
        if self._named is not None:
            cache = self.config.block_cache
            check_tokenizer(prefix, self._named.tokenizer, self._named.model, cache)

    def train_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the training loader, without incomplete batches."""
        return self._loader("train", drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the validation loader. For weight 0 in the split return an empty list."""
        return self._loader("valid", drop_last=False)

    def test_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the test loader. For weight 0 in the split return an empty list."""
        return self._loader("test", drop_last=False)

    def predict_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return a loader of the test part."""
        return self._loader("test", drop_last=False)

    def _loader(
        self, name: IndexSplit, *, drop_last: bool
    ) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        if name not in self._datasets:
            return []
        dataset = self._datasets[name]
        if drop_last and self.batch_size_schedule is None and len(dataset) < self.batch_size:
            raise ConfigError(
                f"{self.data_prefix}: the {name} part of split={self.config.split!r} has "
                f"{len(dataset)} samples of {self.sequence_length} tokens, and "
                f"batch_size={self.batch_size}: there is no full batch. Set batch_size to "
                f"{len(dataset)} or less, or num_{name}_samples to read the data repeatedly."
            )
        batches: dict[str, Any] = {
            "batch_size": self.batch_size,
            "shuffle": False,
            "drop_last": drop_last,
        }
        if name == "train" and self.batch_size_schedule is not None:
            batches = {
                "batch_sampler": ScheduledBatchSampler(
                    SequentialSampler(dataset), self.batch_size_schedule
                )
            }
        return self._loader_of(dataset, **batches)
