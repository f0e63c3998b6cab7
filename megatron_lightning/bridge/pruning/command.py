"""``megatron-lightning convert prune``."""

from __future__ import annotations

from pathlib import Path

from megatron_lightning.bridge.auto import AutoBridge, is_checkpoint
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.pruning.pruned_folder import pruned_folder
from megatron_lightning.bridge.pruning.sizes import Sizes
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.checkpoint.progress import progress_bar
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.blueprint import num_parameters


def prune(  # noqa: PLR0917  # every argument is an option of the command line
    source: str,
    target: str,
    statistics: str | None = None,
    ffn_hidden_size: int | None = None,
    num_attention_heads: int | None = None,
    hidden_size: int | None = None,
    num_moe_experts: int | None = None,
    num_layers: int | None = None,
    drop_layers: list[int] | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    family: str | None = None,
) -> None:
    """Write a folder of a smaller model: without the units that matter least over the tokens of
    an evaluation.

    Args:
        source: A Hugging Face folder, or a Hub id.
        target: The folder to write.
        statistics: File of the callback ``LayerStatistics``. Needed unless only ``drop_layers`` is
            set.
        ffn_hidden_size: Width of dense feed-forward layers.
        num_attention_heads: Query heads, a multiple of the query groups, whose number stays.
        hidden_size: Width of the residual stream.
        num_moe_experts: Experts of each layer.
        num_layers: Layers. Those that turn their input the least go.
        drop_layers: Numbers of the layers to drop, such as ``[5,6]``.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules of ``GPTModel``, by name or class path. Default: those of the folder's
            architecture.

    Raises:
        CheckpointError: If the target exists, or the statistics are of another model.
        ConfigError: If the folder has no family, or a size cannot be had, saying what works.
    """
    sizes = Sizes(
        ffn_hidden_size, num_attention_heads, hidden_size, num_moe_experts, num_layers,
        tuple(drop_layers or ()),
    )  # fmt: skip
    if is_checkpoint(source):
        raise ConfigError(
            f"{source} is a checkpoint. Write it as a folder first: megatron-lightning convert "
            f"export {source} FOLDER."
        )
    if sizes.needs_statistics and statistics is None:
        raise ConfigError(
            "statistics is not set, and units are chosen by them. Take them by the callback "
            "LayerStatistics under validate, and set --statistics FILE. Only drop_layers needs "
            "none."
        )
    found = Statistics({}, source) if statistics is None else Statistics.load(statistics)
    bridge = AutoBridge.from_hf_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code, family=family
    )
    gpt = bridge.gpt_folder()
    found.check(gpt.tensors(gpt.config), source)
    before = num_parameters(gpt.config)
    pruned = pruned_folder(bridge, sizes, found)
    num_bytes = sum(tensor.nbytes for tensor in pruned.tensors.values())
    with progress_bar("pruning", num_bytes) as advance:
        write_folder(
            Path(target), pruned.folder, pruned.tensors, overwrite=overwrite, files=pruned.files,
            advance=advance,
        )  # fmt: skip
    after = num_parameters(pruned.config)
    kept = ", ".join(map(str, pruned.layers))
    print(
        f"{target} holds {after:,} of {before:,} parameters ({after / before:.0%}), and the layers "
        f"{kept}."
    )
    print(f"  next: distill {source} into it, with DistillationModule")
