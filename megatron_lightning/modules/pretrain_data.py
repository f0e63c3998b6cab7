"""LightningDataModule of a pre-training run: an indexed dataset served as fixed-length samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, SequentialSampler

from megatron_lightning.checkpoint.kept_files import TOKENIZER, KeptFiles
from megatron_lightning.config.global_batch import replica_batch_size
from megatron_lightning.data.batch_size import BatchSizeSchedule, ScheduledBatchSampler
from megatron_lightning.data.blended import BlendedDataset, BlendSpec, DataSpec, NamedDatasets
from megatron_lightning.data.continued import (
    ContinuedBlend,
    Make,
    Phase,
    describe_phase,
    goes_on,
    next_phase,
    train_state,
)
from megatron_lightning.data.fim import FillInTheMiddle
from megatron_lightning.data.gpt import GPTDataset, GPTDatasetConfig, IndexSplit, plan_part
from megatron_lightning.data.gpt_index import split_matrix
from megatron_lightning.data.identity import content_digest
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.mock import MockGPTDataset
from megatron_lightning.data.resume import OnChangedData, describe_changes
from megatron_lightning.data.sidecar import check_tokenizer
from megatron_lightning.data.skipped import SkippedSamples
from megatron_lightning.data.tokenizers import TokenizerType, load_tokenizer, tokenizer_files
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.run_data import Batch, RunDataModule

_SPLIT = "969,30,1"


class PretrainDataModule(RunDataModule):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "loss_mask": [b, s]}`` from files of
    ``megatron-lightning preprocess``.

    The datasets are shuffled already and read in order, so that the number of consumed samples is
    the position in the data. Labels are already shifted. With ``reset_attention_mask`` a batch also
    has ``document_ids`` [b, s]. With ``reset_attention_mask`` or ``reset_position_ids`` a batch has
    ``position_ids`` [b, s].

    Args:
        data_prefix: Path of the ``.bin`` and ``.idx`` files without their suffixes. Several data
            sets: a list of paths, mixed by size, or a list of pairs of a weight and a path:
            ``[[0.3, a], [0.7, b]]``. Separate data: ``{train: …, validation: …, test: …}`` with a
            path or list for each part, reading all documents. Validation may have several sets by
            name, ``{code: c, web: w}``, with losses logged as ``val_loss/code`` beside
            ``val_loss``. A JSON or YAML file may hold any of these forms.
        sequence_length: Tokens of a sample (s).
        batch_size: Samples of a batch on a data-parallel rank (b). Leave out with
            ``global_batch_size``.
        global_batch_size: Samples of an optimizer step over all data-parallel ranks, for any number
            of ranks. Replaces ``batch_size``.
        batch_size_schedule: Growing global batch sizes of training. Replaces ``batch_size``.
        split: Weights of train, validation and test, splitting the documents in file order. A part
            of weight 0 has no loader. ``predict`` reads the test part. None: 969, 30 and 1.
        seed: Seed of the order of documents and samples.
        num_train_samples: Training samples of the full run, over as many epochs as needed. Default:
            one epoch, repeated by Lightning in the same order.
        num_val_samples: Validation samples. Default: all validation samples once.
        num_test_samples: Test samples. Default: all test samples once.
        vocab_size: Size of the vocabulary. A larger id in the data is an error. Default: the
            tokenizer's or model's size.
        tokenizer_model: Tokenizer of the data, for vocabulary, padding and end-of-document ids.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        eod_mask_loss: Whether positions of an end of document have no loss.
        reset_position_ids: Whether positions restart at 0 after every end of document.
        reset_attention_mask: Whether tokens attend only to tokens of the same document. An end of
            document belongs to the ended document. The batch numbers the documents of each row, and
            the model compares the numbers: there is no dense mask.
        num_workers: Worker processes of each loader on each rank. 0 reads in the training process.
        cache_dir: Folder of the index cache. Default: ``{data_prefix}/cache``. Without a shared
            file system each node builds a local cache. Data at a URL need the folder: blocks that
            are read are kept there.
        cache_bytes: Size of the blocks kept of data at a URL. Default: no limit.
        skip_samples: Ranges [first, end] of ``consumed_samples`` skipped by training, such as the
            samples of a loss spike. Skipped samples count as consumed. A checkpoint keeps the
            ranges.
        fim: Rearrangement of documents for fill-in-the-middle. Needs ``tokenizer_model``.
        mock: Whether samples are random, without any data, to time a layout. Without
            ``num_train_samples`` there are a million samples.
        on_changed_data: Reaction of a resumed run if the order of training samples has changed
            since the checkpoint. ``refuse`` raises an error. ``continue``: every data set resumes
            in its own order at its last sample, new data sets begin at 0, and a table lists the
            samples read twice. ``restart``: all data sets begin again. ``reorder`` reads on at the
            same position of the new order with a warning.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If the data or the tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """

    sequence_dims: Mapping[str, int] = MappingProxyType(
        {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "document_ids": 1}
    )
    """Sequence dim of each batch entry."""

    def __init__(
        self,
        data_prefix: str | list[str] | list[tuple[float, str]] | dict[str, Any] | None = None,
        sequence_length: int = 0,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        batch_size_schedule: BatchSizeSchedule | None = None,
        split: str | None = None,
        seed: int = 1234,
        num_train_samples: int | None = None,
        num_val_samples: int | None = None,
        num_test_samples: int | None = None,
        vocab_size: int | None = None,
        tokenizer_model: str | None = None,
        tokenizer_type: TokenizerType = "sentencepiece",
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        num_workers: int = 0,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
        skip_samples: list[list[int]] | None = None,
        fim: FillInTheMiddle | None = None,
        mock: bool = False,
        on_changed_data: OnChangedData = "refuse",
    ) -> None:
        super().__init__(num_workers)
        _check_counts(
            num_workers,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            num_train_samples=num_train_samples,
            num_val_samples=num_val_samples,
            num_test_samples=num_test_samples,
        )
        if (batch_size is None) == (global_batch_size is None) and batch_size_schedule is None:
            raise ConfigError(
                f"batch_size is {batch_size} and global_batch_size is {global_batch_size}. Set one "
                "of the two: samples of one data-parallel rank, or of all together."
            )
        if on_changed_data not in get_args(OnChangedData):
            raise ConfigError(
                f"on_changed_data={on_changed_data!r}; must be one of "
                f"{', '.join(get_args(OnChangedData))}."
            )
        self.on_changed_data: OnChangedData = on_changed_data
        self.skip_samples = [list(r) for r in SkippedSamples(skip_samples or ()).ranges]
        """Samples skipped by training."""
        self.batch_size_schedule = batch_size_schedule
        if mock == (data_prefix is not None):
            raise ConfigError(
                f"data_prefix is {data_prefix!r} and mock is {mock}: the tokens come from files, "
                "or are random. Set one of the two."
            )
        if mock and fim is not None:
            raise ConfigError(
                "fim rearranges documents, and the tokens of mock=True are random. Leave one of "
                "the two out."
            )
        if mock and on_changed_data in {"continue", "restart"}:
            raise ConfigError(
                f"on_changed_data={on_changed_data!r} goes on with data sets that have changed, "
                "and mock=True reads none. Leave one of the two out."
            )
        self.mock = mock
        self.data = DataSpec.parse(data_prefix or "mock")
        if not self.data.is_split and split is not None:
            raise ConfigError(
                f"split={split!r} beside data_prefix with train, validation and test, each of "
                "which reads all documents of its own data: leave split out, or set split=null "
                "over the value of a recipe"
            )
        self.data_prefix = data_prefix
        self.global_batch_size = global_batch_size
        self._batch_size = batch_size
        self._tokenizer_model, self._tokenizer_type = tokenizer_model, tokenizer_type
        self._fim = fim
        self.tokenizer = (
            None if tokenizer_model is None else load_tokenizer(tokenizer_model, tokenizer_type)
        )
        self.config = GPTDatasetConfig(
            sequence_length=sequence_length,
            random_seed=seed,
            split=split or _SPLIT,
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            eod_mask_loss=eod_mask_loss,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            fim=fim,
        )
        if fim is not None and self.tokenizer is None:
            raise ConfigError(
                "fim cuts texts at characters, and tokenizer_model is left out. Set it to the "
                "tokenizer of the data."
            )
        self._num_samples: dict[IndexSplit, int | None] = {
            "train": num_train_samples,
            "valid": num_val_samples,
            "test": num_test_samples,
        }
        self._descriptions: dict[str, Mapping[str, Any]] = {}
        self._datasets: dict[IndexSplit, Any] = {}

    @property
    def batch_size(self) -> int:
        """Samples of a batch on a data-parallel rank. With ``global_batch_size`` known from the
        Trainer's setup on.

        Raises:
            ConfigError: If the ranks do not divide the global batch.
        """
        if self._batch_size is not None or self.global_batch_size is None:
            return self._batch_size or 1
        trainer = self.trainer
        sharing = getattr(trainer and trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return replica_batch_size(
            self.global_batch_size,
            sharing.get("num_replicas", 1),
            1 if trainer is None else trainer.accumulate_grad_batches,
        )

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self.config.sequence_length

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary. None if neither the setting nor a tokenizer gives a size."""
        return self.config.num_ids

    def check_files(self, stage: str) -> None:
        """Check that the data suffice for ``stage``, before the strategy starts a process, without
        building indices.

        Raises:
            ConfigError: If there is no part to train on.
            DataError: If the data cannot be read, or a part of the split has too few tokens.
        """
        # A subclass may create the files in prepare_data.
        if not self.mock and type(self).prepare_data is PretrainDataModule.prepare_data:
            for name, num_samples in self._parts(stage).items():
                for spec in self._blends(name):
                    single = num_samples if spec.is_single else None
                    for prefix in spec.prefixes:
                        plan_part(self._indexed(prefix), self._split_of(name), name, single)
                        self._check_tokenizer(prefix)

    def prepare_data(self) -> None:
        """Build the index cache. Lightning calls this once on every node."""
        self._open((self.trainer and self.trainer.state.fn) or "fit")

    def setup(self, stage: str) -> None:
        """Map the data and their indices into memory."""
        self._datasets.update(self._open(stage))

    def train_dataset(self) -> Any:
        """Return the training samples in the order of a fit. ``setup`` must have run."""
        return self._datasets["train"]

    def train_prefixes(self) -> list[str]:
        """Return the data sets of training. None for random samples."""
        return [] if self.mock else list(self._blends("train")[0].prefixes)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the order of training samples, as plain values."""
        consumed = self._consumed_samples()
        order = self._order()
        data: dict[str, Any] = {}
        if not self.mock:
            data = train_state(self._datasets.get("train"), self._contents(), consumed)
        return {
            "order": order,
            "consumed_samples": consumed,
            **data,
            "skip_samples": self.skip_samples,
            **self._kept_tokenizer,
        }

    @cached_property
    def _kept_tokenizer(self) -> dict[str, Any]:
        """The tokenizer for a checkpoint, so that text needs no other file."""
        if self.tokenizer is None:
            return {}
        files = tokenizer_files(self.tokenizer, str(self._tokenizer_model))
        kept = {"type": self._tokenizer_type, "model": str(self._tokenizer_model)}
        return {TOKENIZER: {**kept, "files": KeptFiles(files).to_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed fit reads the samples in the checkpoint's order.

        Raises:
            CheckpointError: If the order has changed, unless ``on_changed_data`` accepts the
                change.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return
        order, there = self._order(), state_dict["order"]
        if state_dict.get("phase") is not None:
            self._begin(Phase(**state_dict["phase"]))
        restarts = self.on_changed_data == "restart"
        if goes_on(self.on_changed_data, order, there):
            blend = self._begin(
                next_phase(state_dict, state_dict["consumed_samples"], restarts=restarts)
            )
            warning: str | None = describe_phase(
                blend, self._blends("train")[0], state_dict, restarts=restarts
            )
        else:
            warning = describe_changes(
                order,
                there,
                on_changed_data=self.on_changed_data,
                consumed_samples=state_dict["consumed_samples"],
            )
        if warning is not None:
            rank_zero_warn(warning)
        both = SkippedSamples([*self.skip_samples, *state_dict.get("skip_samples", [])])
        self.skip_samples = [list(r) for r in both.ranges]

    def _begin(self, phase: Phase) -> ContinuedBlend:
        """Read the current training data from a position of the run on."""
        (spec,) = self._blends("train")
        size = self._num_samples["train"]
        blend = ContinuedBlend(spec, self._contents(), size, phase, self._make("train"))
        self._datasets["train"] = blend
        return blend

    def _contents(self) -> list[str]:
        """Return the digest of each training data set."""
        return [self._described(prefix)["content"] for prefix in self._blends("train")[0].prefixes]

    def _order(self) -> dict[str, Any]:
        if self.mock:
            names = ("sequence_length", "random_seed")
            return {"mock": True, **{name: getattr(self.config, name) for name in names}}
        (spec,) = self._blends("train")
        rows = [self._described(prefix) for prefix in spec.prefixes]
        counts: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if spec.is_single:
            counts = {name: values[0] for name, values in counts.items()}
        else:
            counts["weights"] = None if spec.weights is None else list(spec.weights)
        return {
            "sequence_length": self.sequence_length,
            "seed": self.config.random_seed,
            "split": self._split_of("train").split,
            "num_train_samples": self._num_samples["train"],
            "fim": None if self._fim is None else self._fim.settings,
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

    def _blends(self, name: IndexSplit) -> list[BlendSpec]:
        """Return the blends of a part. Validation has a blend for each set."""
        if name == "valid":
            return list(self.data.validation.values())
        blend = self.data.train if name == "train" else self.data.test
        if blend is None and name == "train":
            raise ConfigError("data_prefix has no train data; add them under train")
        return [] if blend is None else [blend]

    def _split_of(self, name: IndexSplit) -> GPTDatasetConfig:
        """Return the options of a part. A part with separate data has all documents."""
        whole = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}[name]
        return self.config if self.data.is_split else replace(self.config, split=whole)

    def _parts(self, stage: str) -> dict[IndexSplit, int | None]:
        """Return the requested samples of the parts read by ``stage``. Other parts may be too
        small.
        """
        needed = {
            "fit": ("train", "valid"),
            "validate": ("valid",),
            "test": ("test",),
            "predict": ("test",),
        }.get(stage, ())
        parts = zip(self._num_samples.items(), split_matrix(self.config.split), strict=True)
        return {
            name: count
            for (name, count), bounds in parts
            if name in needed
            and (name == "train" or (self._blends(name) and (bounds or not self.data.is_split)))
        }

    def _make(self, name: IndexSplit) -> Make:
        """Return the factory of a part's data sets."""
        vocab_size = self.config.vocab_size
        if self.vocab_size is None:  # the model's size, if stored as in GPTLightningModule
            size = getattr(getattr(self._run_module(), "config", None), "vocab_size", None)
            vocab_size = size if isinstance(size, int) else None
        config = replace(self._split_of(name), vocab_size=vocab_size)

        def make(prefix: str, num_samples: int | None, pass_number: int = 0) -> GPTDataset:
            seed = (config.random_seed + pass_number) % 2**32
            return GPTDataset(prefix, replace(config, random_seed=seed), name, num_samples)

        return make

    def _open(self, stage: str) -> dict[IndexSplit, Any]:
        if self.mock:
            return {name: self._mocked(name, count) for name, count in self._parts(stage).items()}

        def opened(name: IndexSplit, count: int | None) -> Any:
            for prefix in {prefix for spec in self._blends(name) for prefix in spec.prefixes}:
                self._check_tokenizer(prefix)
            make, short = self._make(name), "val" if name == "valid" else name
            made = [
                make(spec.prefixes[0], count)
                if spec.is_single
                else BlendedDataset(spec, count, make, short)
                for spec in self._blends(name)
            ]
            return NamedDatasets(made) if name == "valid" and self.data.names else made[0]

        return {name: opened(name, count) for name, count in self._parts(stage).items()}

    def _indexed(self, prefix: str) -> IndexedDataset:
        return IndexedDataset(prefix, self.config.block_cache)

    def _check_tokenizer(self, prefix: str) -> None:
        if self.tokenizer is not None:
            name, cache = str(self._tokenizer_model), self.config.block_cache
            check_tokenizer(prefix, self.tokenizer, name, cache)

    def _mocked(self, name: IndexSplit, count: int | None) -> MockGPTDataset:
        config, trainer = self.config, self.trainer
        module = self._module if trainer is None else trainer.lightning_module
        model = getattr(module, "config", None)
        size = config.num_ids or getattr(model, "vocab_size", None)
        if not isinstance(size, int):
            raise ConfigError(
                "mock=True draws tokens below the size of the vocabulary, and neither the data nor "
                "the model's config says it. Set vocab_size."
            )
        part = ("train", "valid", "test").index(name)
        count = count or (10**6 if name == "train" else 10**3)
        return MockGPTDataset(count, config.sequence_length, size, 3 * config.random_seed + part)

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


def _check_counts(num_workers: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count}: must be a positive integer; set it to 1 or more")
    if num_workers < 0:
        raise ConfigError(
            f"num_workers={num_workers}: set it to 0 to read in the training process, or to 1 or "
            "more"
        )
