"""Facts of a run's model that data read before the model is built: the folder's tokenizer and end
tokens, and the size of the vocabulary. Known without Lightning, so that tools start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_lightning.bridge.folders.hub import find_file, local_folder
from megatron_lightning.checkpoint.kept_files import KeptFiles, read_kept_files
from megatron_lightning.checkpoint.text_record import (
    TextRecord,
    end_tokens,
    read_text_record,
)
from megatron_lightning.config import TransformerConfig
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.images.image_options import ImageOptions
from megatron_lightning.data.images.image_positions import ImagePositions
from megatron_lightning.data.images.image_processor import ImageProcessor
from megatron_lightning.data.rows.row_costs import CostTable, RowCosts
from megatron_lightning.errors import CheckpointError, ConfigError, DataError
from megatron_lightning.file_names import GENERATION_CONFIG
from megatron_lightning.planning.document_costs import image_operations, text_operations


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """Hugging Face folder of a model, without the weights.

    Args:
        path: Folder or Hub id.
        revision: Branch, tag or commit of the Hub id. None: main.
        trust_remote_code: Whether code in the folder may run.
        checkpoint: Returns the checkpoint loaded by the run, if the checkpoint keeps the files of
            the folder.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    checkpoint: Callable[[], str | None] | None = None

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Yield a folder with the complete model except weights."""
        path = self._place()
        if (kept_files := _kept_files(path)) is not None:
            with kept_files.unpacked() as folder:
                yield folder
        else:
            yield local_folder(path, revision=self.revision, weights=False)

    def tokenizer(self, new_tokens: Sequence[str] = ()) -> ChatTokenizer:
        """Return the tokenizer.

        Args:
            new_tokens: Texts to add as new tokens.

        Raises:
            DataError: If the folder has no tokenizer.
        """
        with self.files() as folder:
            trusts = self.trust_remote_code
            return ChatTokenizer.load(folder, new_tokens=new_tokens, trust_remote_code=trusts)

    def generation_ends(self) -> tuple[int, ...]:
        """Return the ids at which generation stopped before training."""
        if (record := _text_record(self._place())) is not None:
            return record.ends_before
        with self.files() as folder:
            return _ends_in(find_file(folder, GENERATION_CONFIG)) or ()

    def _place(self) -> str:
        return (self.checkpoint and self.checkpoint()) or self.path


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model. The defaults are those of a run without a model. A ``RunModel`` of the
    data.

    Args:
        folder: Folder of the model. None: the model needs no folder.
        vocab_size: Size of the vocabulary, if a ``TransformerConfig`` says it.
        config: Configuration of a ``GPTModel``.
        fills_experts: Whether experts are filled to a capacity.
        reads_scores: Whether the loss reads scores of a reference from the data.
        reads_margins: Whether the loss reads margins of pairs from the data.
    """

    folder: ModelFolder | None = None
    vocab_size: int | None = None
    config: TransformerConfig | None = None
    fills_experts: bool = False
    reads_scores: bool = False
    reads_margins: bool = False

    @classmethod
    def of_module(cls, module: Any) -> ModelFacts:
        """Return the facts of a LightningModule, or of a run without one."""
        config = getattr(module, "config", None)
        size = getattr(config, "vocab_size", None)
        moe = config.moe if isinstance(config, TransformerConfig) else None
        folder = getattr(module, "model_folder", None)
        return cls(
            folder=folder if isinstance(folder, ModelFolder) else None,
            vocab_size=size if isinstance(size, int) else None,
            config=config if isinstance(config, TransformerConfig) else None,
            fills_experts=moe is not None and moe.pad_expert_input_to_capacity,
            reads_scores=getattr(module, "reference", None) == "scores",
            reads_margins=getattr(module, "reads_margins", False) is True,
        )

    def tokenizer(self, new_tokens: Sequence[str] = ()) -> ChatTokenizer | None:
        """Return the tokenizer in the model's folder. None: there is no folder.

        Args:
            new_tokens: Texts to add as new tokens.

        Raises:
            DataError: If the folder has no tokenizer.
        """
        return None if self.folder is None else self.folder.tokenizer(new_tokens)

    def image_processor(self, tokenizer: ChatTokenizer, options: ImageOptions) -> ImageProcessor:
        """Return the processor of images, or of sounds, in the model's folder.

        Args:
            tokenizer: Tokenizer of the data.
            options: Of images or sounds.

        Raises:
            ConfigError: If there is no folder, or the folder has no processor.
        """
        if self.folder is None:
            raise ConfigError(
                "images or audio of FinetuneDataModule is set, and the model has no folder with a "
                "processor. Train a HuggingFaceModule of a model with a tower."
            )
        with self.folder.files() as folder:
            trusts = self.folder.trust_remote_code
            return ImageProcessor.load(
                folder,
                tokenizer.tokenizer,
                options.processor_options,
                trusts=trusts,
                medium=options.kind,
            )

    def image_positions(self) -> ImagePositions | None:
        """Return the positions of a model that has several a token. None: it has one."""
        if self.folder is None:
            return None
        with self.folder.files() as folder:
            return ImagePositions.load(folder, trusts=self.folder.trust_remote_code)

    def row_costs(self, longest: int) -> RowCosts | None:
        """Return the operations of documents of up to ``longest`` tokens, as if all parameters were
        trained. None: the model has no formulas.
        """
        config, tower = self.config, None
        if config is None and self.folder is not None:
            # Its import of all layers takes longer than all that `data show` does.
            from megatron_lightning.recipe_reading.image_models import trained_model

            with self.folder.files() as folder:
                found = trained_model(folder, trusts=self.folder.trust_remote_code)
            config, tower = found or (None, None)
        if config is None:
            return None
        image = None if tower is None else CostTable(*image_operations(tower, longest))
        return RowCosts(CostTable(*text_operations(config, longest)), image)

    def generation_ends(self, tokenizer: object = None) -> tuple[int, ...]:
        """Return the ids at which generation stops, of the generation configuration beside the
        data's tokenizer, or of the model.

        Args:
            tokenizer: Folder of the data's tokenizer, a name, or a tokenizer.
        """
        folder = self.folder
        if isinstance(tokenizer, str | Path):
            is_own = folder is not None and str(tokenizer) == folder.path
            revision = folder.revision if folder is not None and is_own else None
            ends = _ends_in(find_file(tokenizer, GENERATION_CONFIG, revision=revision))
            if ends is not None:
                return ends
        return () if folder is None else folder.generation_ends()

    def tokenizer_files(self, tokenizer: ChatTokenizer, *, is_given: bool) -> KeptFiles | None:
        """Return the files of the data's tokenizer. None: it is the tokenizer of the model's
        folder.

        Args:
            tokenizer: The data's tokenizer.
            is_given: Whether the data name a tokenizer of their own.
        """
        if not is_given and not tokenizer.added:
            return None
        if is_given:
            try:
                theirs = self.tokenizer()
            except DataError:  # a folder without a tokenizer
                theirs = None
            if theirs is not None and theirs.is_equal(tokenizer):
                return None
        with TemporaryDirectory(prefix="tokenizer-") as folder:
            tokenizer.tokenizer.save_pretrained(folder)
            return KeptFiles.of_folder(Path(folder))


def _ends_in(file: Path | None) -> tuple[int, ...] | None:
    """Return the end tokens of a generation configuration. None: there is no file."""
    return None if file is None else end_tokens({GENERATION_CONFIG: file.read_bytes()})


def _text_record(path: str) -> TextRecord | None:
    """Return the record of texts in a checkpoint. None: ``path`` is no checkpoint with a record."""
    try:
        return read_text_record(path)
    except (CheckpointError, OSError):
        return None


def _kept_files(path: str) -> KeptFiles | None:
    """Return the folder's files in a checkpoint. None: ``path`` is no checkpoint with a folder."""
    try:
        return read_kept_files(path)
    except (CheckpointError, OSError):
        return None
