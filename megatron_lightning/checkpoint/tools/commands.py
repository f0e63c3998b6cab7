"""``megatron-lightning checkpoint …``: the tools for checkpoints with a progress bar. Signatures
are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from megatron_lightning.checkpoint.format.storage import folder_of
from megatron_lightning.checkpoint.listing import read_manifest
from megatron_lightning.checkpoint.progress import progress_bar
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.tools import (
    averaging,
    consolidation,
    pruning,
    resharding,
    verification,
)
from megatron_lightning.checkpoint.tools.inspection import contents, describe, readable_bytes
from megatron_lightning.errors import CheckpointError, ReportedError
from megatron_lightning.printed_json import json_text

_LISTED = 20


def inspect(path: str, tensors: str | None = None, json: bool = False) -> None:
    """Print the contents of a checkpoint, without reading tensors.

    Args:
        path: A checkpoint directory or a plain .ckpt file.
        tensors: List every tensor with a global name matching this pattern ("*" for all).
        json: Print JSON: path, files, bytes, info, groups, state, tensors.
    """
    sizes = folder_of(path).sizes()
    # Files of tensors are not opened.
    total = sum(size for name, size in sizes.items() if not name.endswith(".safetensors"))
    with progress_bar("inspecting", total) as advance:
        if json:
            text = json_text(contents(path, tensors=tensors), default=str)
        else:
            text = describe(path, tensors=tensors)
        advance(total)
    print(text)


def verify(path: str, json: bool = False) -> None:
    """Read a checkpoint directory and recompute every checksum.

    Args:
        path: The checkpoint directory.
        json: Print JSON: path, num_tensors, num_files, bytes, damages.

    Raises:
        CheckpointError: Naming the damaged byte ranges.
    """
    manifest = read_manifest(path)
    total = sum(manifest.files.values())
    with progress_bar("verifying", total) as advance:
        damages = verification.verify(path, advance=advance)
    if json:
        known = {
            "path": path,
            "num_tensors": len(manifest.tensors),
            "num_files": len(manifest.files),
            "bytes": total,
            "damages": [damage._asdict() for damage in damages],
        }
        print(json_text(known))
    if damages:
        listing = "; ".join(map(str, damages[:_LISTED]))
        more = f"; and {len(damages) - _LISTED} more" if len(damages) > _LISTED else ""
        message = f"{path} is damaged in {len(damages)} places: {listing}{more}"
        raise ReportedError(message) if json else CheckpointError(message)
    if not json:
        print(
            f"{path} is sound: {len(manifest.tensors)} tensors in {len(manifest.files)} files, "
            f"{readable_bytes(total)}"
        )


def reshard(
    source: str,
    target: str,
    num_files: int = 1,
    tensor_model_parallel_size: int = 1,
    like: str | None = None,
) -> None:
    """Rewrite a checkpoint into other files. Every layout reads the checkpoint, before and after.

    Args:
        source: A checkpoint directory, or a plain .ckpt file (without optimizer states).
        target: The checkpoint directory to write.
        num_files: Number of files of tensors, of about equal size.
        tensor_model_parallel_size: Split matrices into this number of column blocks too. Ranks of
            this tensor parallel size then read only the rank's block.
        like: Instead of the two numbers: a checkpoint saved under the layout of the future reader.
            Each rank of the layout then finds all of the rank's shards in a single file.
    """
    with progress_bar("resharding", _num_bytes(source)) as advance:
        resharding.reshard(
            source,
            target,
            num_files=num_files,
            tensor_model_parallel_size=tensor_model_parallel_size,
            like=like,
            advance=advance,
        )


def consolidate(
    source: str,
    target: str,
    format: Literal["auto", "lightning", "state_dict", "safetensors"] = "auto",
) -> None:
    """Convert a checkpoint directory to a plain file, with the module's names.

    Args:
        source: The checkpoint directory.
        target: The file to write. An existing file is replaced.
        format: lightning: a .ckpt for load_from_checkpoint and a plain Trainer. state_dict: the
            module's tensors, saved by torch. safetensors: the module's tensors as a safetensors
            file, with memory independent of the model's size. auto: by the ending of the target's
            name.
    """
    chosen = consolidation.format_of(target) if format == "auto" else format
    with progress_bar("consolidating", consolidation.num_bytes(source, chosen)) as advance:
        consolidation.consolidate(source, target, format=chosen, advance=advance)


def average(target: str, sources: list[str]) -> None:
    """Write a checkpoint with the mean weights of several checkpoints.

    Args:
        target: The checkpoint directory to write, with weights and without optimizer states.
        sources: Checkpoints of the same model, of any layouts.
    """
    with progress_bar(
        "averaging", sum(_num_bytes(source, "state_dict.") for source in sources)
    ) as advance:
        averaging.average(target, sources, advance=advance)


def prune(  # noqa: PLR0917  # every one is an option of the command line
    folder: str,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: list[str] | None = None,
    min_age_minutes: float = 60.0,
    delete: bool = False,
) -> None:
    """List unneeded entries of a folder of checkpoints, and delete the listed entries with
    --delete.

    Args:
        folder: The folder of checkpoints, or a URL. Leftovers of killed saves are always listed.
        keep_last: List old checkpoints, except this many of the newest.
        keep_every: List old checkpoints, except checkpoints with a step divisible by this number.
        keep: Never list names matching any of these patterns.
        min_age_minutes: Never list younger leftovers: another job may still be writing.
        delete: Delete the listed entries. Without this option nothing changes.
    """
    entries = pruning.find_prunable(
        folder,
        keep_last=keep_last,
        keep_every=keep_every,
        keep=keep or (),
        min_age_s=60.0 * min_age_minutes,
    )
    for entry in entries:
        print(f"{entry.path}  {readable_bytes(entry.size_bytes)}  {entry.reason}")
    total = sum(entry.size_bytes for entry in entries)
    if delete:
        with progress_bar("deleting", total) as advance:
            for entry in entries:
                pruning.prune([entry])
                advance(entry.size_bytes)
    print(
        f"{len(entries)} entries, {readable_bytes(total)}: "
        + ("deleted" if delete else "nothing deleted; add --delete to do it")
    )


def _num_bytes(path: str, prefix: str = "") -> int:
    tensors = open_checkpoint(path).tensors()
    return sum(info.num_bytes() for name, info in tensors.items() if name.startswith(prefix))


COMMANDS: Mapping[str, Callable[..., Any]] = {
    "inspect": inspect,
    "verify": verify,
    "reshard": reshard,
    "consolidate": consolidate,
    "average": average,
    "prune": prune,
}
