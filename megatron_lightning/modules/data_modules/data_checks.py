"""Checks of data against the configuration of the model, before the model is built."""

from __future__ import annotations

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.hf_documents import check_parts_documents, code_of_folder
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.modules.language_model import LanguageModule
from megatron_lightning.modules.objective import ObjectiveModule
from megatron_lightning.rules import check_vocabulary


def check_images(module: object) -> None:
    """Check that a module takes images or sounds.

    Raises:
        ConfigError: If the module has a model of text.
    """
    if isinstance(module, LanguageModule) and not isinstance(module, HuggingFaceModule):
        raise ConfigError(
            f"FinetuneDataModule reads images or sounds, and {type(module).__name__} trains text. "
            "Train a HuggingFaceModule of a model with a tower for them, or leave them out."
        )


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
    folder = module.model_folder if isinstance(module, FolderModule) else None
    num_own = num_ids if folder is None else num_ids - num_new
    config = getattr(module, "config", None)
    if isinstance(config, TransformerConfig):
        check_vocabulary(config, num_own)
        if packed and config.moe is not None and "seq_aux_loss" in config.moe.auxiliary_losses:
            raise ConfigError(
                "moe.router_load_balancing_type has seq_aux_loss, which would see all documents of "
                "a packed row as one sequence. Set it to aux_loss or global_aux_loss, or packing "
                "to none."
            )
    if not isinstance(module, HuggingFaceModule) or folder is None:
        return
    # The configuration of the folder, without reading weights.
    with folder.files() as files:
        theirs = AutoBridge(files, trust_remote_code=folder.trust_remote_code).config
    rows = int(theirs.get_text_config().vocab_size)
    if num_own > rows:
        raise ConfigError(
            f"the data's tokenizer has {num_own} ids without new_tokens, and the embedding of "
            f"{folder.path} has {rows} rows. Use the model's own tokenizer, and name what "
            "it lacks in new_tokens, for which the model grows."
        )
    if packed:
        code = code_of_folder(theirs, trusts=folder.trust_remote_code)
        check_parts_documents(theirs, folder.path, code)
