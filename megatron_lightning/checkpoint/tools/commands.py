"""``megatron-lightning checkpoint …``: the tools for checkpoints with a progress bar; signatures
are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from megatron_lightning.checkpoint.format.storage import folder_of
from megatron_lightning.checkpoint.source import open_checkpoint
from megatron_lightning.checkpoint.tools import (
    averaging,
    consolidation,
    pruning,
    resharding,
    verification,
)
from megatron_lightning.checkpoint.tools.inspection import describe, readable_bytes
from megatron_lightning.checkpoint.tools.progress import progress_bar
from megatron_lightning.errors import CheckpointError

_LISTED = 20


def inspect(path: str, tensors: str | None = None) -> None:
    """Print what a checkpoint holds; tensors are not read.

    Args:
        path: A checkpoint directory or a plain .ckpt file.
        tensors: List every tensor whose global name fits this pattern ("*" for all).
    """
    sizes = folder_of(path).sizes()
    # The others are not opened.
    total = sum(size for name, size in sizes.items() if not name.endswith(".safetensors"))
    with progress_bar("inspecting", total) as advance:
        text = describe(path, tensors=tensors)
        advance(total)
    print(text)


def verify(path: str) -> None:
    """Read a checkpoint directory and recompute every checksum.

    Args:
        path: The checkpoint directory.

    Raises:
        CheckpointError: Naming the byte ranges that are bad.
    """
    manifest = verification.read_manifest(path)
    total = sum(manifest.files.values())
    with progress_bar("verifying", total) as advance:
        damages = verification.verify(path, advance=advance)
    if damages:
        shown = "; ".join(map(str, damages[:_LISTED]))
        more = f"; and {len(damages) - _LISTED} more" if len(damages) > _LISTED else ""
        raise CheckpointError(f"{path} is damaged in {len(damages)} places: {shown}{more}")
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
    """Rewrite a checkpoint into other files; every layout reads it, before and after.

    Args:
        source: A checkpoint directory, or a plain .ckpt file (without its optimizer states).
        target: The checkpoint directory to write.
        num_files: Number of files of tensors, of about equal size.
        tensor_model_parallel_size: Split matrices into so many blocks of columns too, so that ranks
            of that tensor parallel size read only their own.
        like: Instead of the two numbers: a checkpoint saved under the layout that will read this
            one. Each of its ranks then finds in one file what it would have written itself.
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
    """Make one plain file of a checkpoint directory, with the module's own names.

    Args:
        source: The checkpoint directory.
        target: The file to write; an existing one is replaced.
        format: lightning: a .ckpt that load_from_checkpoint and a plain Trainer read; state_dict:
            the module's tensors, saved by torch; safetensors: the same as a safetensors file, in
            memory that does not grow with the model; auto: by the ending of the target's name.
    """
    chosen = consolidation.format_of(target) if format == "auto" else format
    with progress_bar("consolidating", consolidation.num_bytes(source, chosen)) as advance:
        consolidation.consolidate(source, target, format=chosen, advance=advance)


def average(target: str, sources: list[str]) -> None:
    """Write a checkpoint whose weights are the mean of several others'.

    Args:
        target: The checkpoint directory to write; it holds weights, without optimizer states.
        sources: Checkpoints of one model, of any layouts.
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
    """List what a folder of checkpoints no longer needs, and delete it with --delete.

    Args:
        folder: The folder that holds checkpoints, or the URL of one. Leftovers of killed saves are
            always listed.
        keep_last: List old checkpoints, except this many of the newest.
        keep_every: List old checkpoints, except those whose step is a multiple of this.
        keep: Never list names that fit one of these patterns.
        min_age_minutes: Never list leftovers that are younger: another job may be writing them.
        delete: Delete what is listed. Without it nothing changes.
    """
    found = pruning.find_prunable(
        folder,
        keep_last=keep_last,
        keep_every=keep_every,
        keep=keep or (),
        min_age_s=60.0 * min_age_minutes,
    )
    for entry in found:
        print(f"{entry.path}  {readable_bytes(entry.size_bytes)}  {entry.reason}")
    total = sum(entry.size_bytes for entry in found)
    if delete:
        with progress_bar("deleting", total) as advance:
            for entry in found:
                pruning.prune([entry])
                advance(entry.size_bytes)
    print(
        f"{len(found)} entries, {readable_bytes(total)}: "
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
