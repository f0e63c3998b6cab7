"""Refuse steps that do not do the same on the ranks that share a sequence."""

from __future__ import annotations

import zlib

import torch
from torch.utils._pytree import tree_structure

from megatron_lightning.errors import ConfigError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.pipeline.batch.context_mean import gather_rows
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class SameSteps(Guard):
    """Compare outputs and log calls of every run, before collectives that would pair up wrongly."""

    sentence = (
        "context parallelism: a step returns or logs other things on some of the ranks that share "
        "a sequence, whose reductions would pair up wrongly or wait forever"
    )
    may_warn = False

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether ranks share sequences."""
        return scope.context.cp.size > 1

    def before_reduction(self, run: StepRun) -> None:
        """Compare. A collective of the ranks sharing sequences, one number a run."""
        outputs = [run.outputs[index] for index in sorted(run.outputs)]
        facts = [
            f"returned {None if output is None else tree_structure(output)}" for output in outputs
        ]
        facts += run.facts
        group, device = self.scope.context.cp, self.scope.context.device
        digest = zlib.crc32("\n".join(facts).encode())
        ranks = gather_rows(torch.tensor([digest], dtype=torch.int64, device=device), group)
        if bool((ranks == ranks[0]).all()):
            return
        # Texts are exchanged only for the message of an error.
        facts_by_rank = group.all_gather_object(facts)
        common = set.intersection(*map(set, facts_by_rank))
        differ = sorted({fact for rank_facts in facts_by_rank for fact in rank_facts} - common)
        self.judge.refuse(
            ConfigError(
                f"{run.hook} did not do the same on the {group.size} ranks that share a sequence. "
                f"On some of them only, it {'; it '.join(differ[:5])}. Every rank runs the step on "
                "its own part: do the same whatever the values of the batch are."
            )
        )
