"""Data of a model from a Hugging Face folder: the model's tokenizer, and checks against the model's
configuration, before the model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.hub import find_file, local_folder
from megatron_lightning.checkpoint.kept_files import KeptFiles, read_kept_files
from megatron_lightning.checkpoint.text_record import (
    GENERATION,
    TextRecord,
    end_tokens,
    read_text_record,
)
from megatron_lightning.config import TransformerConfig
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.errors import CheckpointError, ConfigError, DataError
from megatron_lightning.models.plans.hf_documents import check_parts_documents
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.modules.objective import ObjectiveModule
from megatron_lightning.rules import check_vocabulary


def folder_tokenizer(module: object, new_tokens: Sequence[str] = ()) -> ChatTokenizer | None:
    """Return the tokenizer in the folder of a module's model. None: there is no folder.

    Args:
        module: A LightningModule.
        new_tokens: Texts to add as new tokens.

    Raises:
        DataError: If the folder has no tokenizer.
    """
    if not isinstance(module, FolderModule) or module._source is None:
        return None
    with _without_weights(module) as folder:
        trusts = bool(module._source.get("trust_remote_code"))
        return ChatTokenizer.load(folder, new_tokens=new_tokens, trust_remote_code=trusts)


def tokenizer_files(
    module: object, tokenizer: ChatTokenizer, *, is_given: bool
) -> KeptFiles | None:
    """Return the files of the data's tokenizer. None: it is the tokenizer of the model's folder.

    Args:
        module: A LightningModule, or None.
        tokenizer: The data's tokenizer.
        is_given: Whether the data name a tokenizer of their own.
    """
    if not is_given and not tokenizer.added:
        return None
    if is_given:
        try:
            theirs = folder_tokenizer(module)
        except DataError:  # a folder without a tokenizer
            theirs = None
        if theirs is not None and theirs.is_equal(tokenizer):
            return None
    with TemporaryDirectory(prefix="tokenizer-") as folder:
        tokenizer.tokenizer.save_pretrained(folder)
        return KeptFiles.of_folder(Path(folder))


def generation_ends(module: object, tokenizer: object = None) -> tuple[int, ...]:
    """Return the ids at which generation stops, of the generation configuration beside the data's
    tokenizer, or of the module's model.

    Args:
        module: A LightningModule.
        tokenizer: Folder of the data's tokenizer, a name, or a tokenizer.
    """
    source = (module._source if isinstance(module, FolderModule) else None) or {}
    file = None
    if isinstance(tokenizer, str | Path):
        is_own = str(tokenizer) == str(source.get("path"))
        file = find_file(tokenizer, GENERATION, revision=source["revision"] if is_own else None)
    if file is not None:
        return end_tokens({GENERATION: file.read_bytes()})
    if not isinstance(module, FolderModule) or module._source is None:
        return ()
    if (record := _text_record(_path_of(module))) is not None:
        return record.ends_before
    with _without_weights(module) as folder:
        file = find_file(folder, GENERATION)
        return () if file is None else end_tokens({GENERATION: file.read_bytes()})


def check_model(module: object, num_ids: int, *, packed: bool, num_new: int = 0) -> None:
    """Check that a module's model accepts the ids and rows of the data.

    Args:
        module: A LightningModule.
        num_ids: Number of ids of the data's tokenizer.
        packed: Whether documents share rows.
        num_new: Ids of new tokens among them, for which a folder's model grows.

    Raises:
        ConfigError: If the embedding has fewer rows, or documents in a row would see each other,
            in attention or in a balancing loss of experts.
    """
    if isinstance(module, ObjectiveModule):
        for template in module.templates():
            grows = template is module.template or module.shares_vocabulary
            check_model(template, num_ids, packed=packed, num_new=num_new if grows else 0)
        return
    has_folder = isinstance(module, FolderModule) and module._source is not None
    num_own = num_ids - num_new if has_folder else num_ids
    config = getattr(module, "config", None)
    if isinstance(config, TransformerConfig):
        check_vocabulary(config, num_own)
        if packed and config.moe is not None and "seq_aux_loss" in config.moe.auxiliary_losses:
            raise ConfigError(
                "moe.router_load_balancing_type has seq_aux_loss, which would see all documents of "
                "a packed row as one sequence. Set it to aux_loss or global_aux_loss, or packing "
                "to none."
            )
    if not isinstance(module, HuggingFaceModule):
        return
    source = dict(module._source or {})
    # The configuration of the folder, without reading weights.
    with _without_weights(module) as folder:
        trusts = bool(source.get("trust_remote_code"))
        theirs = AutoBridge(folder, trust_remote_code=trusts).config
    rows = int(theirs.get_text_config().vocab_size)
    if num_own > rows:
        raise ConfigError(
            f"the data's tokenizer has {num_own} ids without new_tokens, and the embedding of "
            f"{source.get('path')} has {rows} rows. Use the model's own tokenizer, and name what "
            "it lacks in new_tokens, for which the model grows."
        )
    if packed:
        check_parts_documents(theirs, str(source.get("path")))


@contextmanager
def _without_weights(module: FolderModule) -> Iterator[Path]:
    """Yield a folder with the complete model except weights."""
    source = dict(module._source or {})
    path = _path_of(module)
    if (kept_files := _kept_files(path)) is not None:
        with kept_files.unpacked() as folder:
            yield folder
    else:
        yield local_folder(path, revision=source["revision"], weights=False)


def _path_of(module: FolderModule) -> str:
    """Return the checkpoint loaded by the run if it keeps the folder, else the folder."""
    return module._checkpoint or str((module._source or {})["path"])


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
