"""Text and scores by a rank's part of a model, on any layout: a cache of keys, and continuous
batching.

All ranks of a replica run the same scheduler on the same requests. Only chosen tokens travel, from
the last stage to the other stages. Replicas have different requests. If forwards are collectives of
several replicas (shared experts, weights gathered by FSDP), the replicas step together, and a
replica without requests computes padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.assembly.part import Part, describe_part
from megatron_lightning.assembly.stage_runner import StageRunner
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.expert_routes import RouteRecorder, check_recorded
from megatron_lightning.inference.engine.keys.key_slots import Allocator, Pages, Runs
from megatron_lightning.inference.engine.pipelined_steps import Rounds
from megatron_lightning.inference.engine.request_batch import Batch, Request
from megatron_lightning.inference.engine.requests import Decode, RequestMaker
from megatron_lightning.inference.engine.scheduler import Scheduler
from megatron_lightning.inference.engine.speculative import make_drafter
from megatron_lightning.inference.engine.step_inputs import Steps
from megatron_lightning.inference.engine.text_model import Observe, TextModel
from megatron_lightning.inference.engine.token_choice import NUM_RESULTS
from megatron_lightning.layers.state.key_cache import KeyCache
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.executor import PipelineExecutor
from megatron_lightning.pipeline.schedules.actions import Placement


class Engine(TextModel):
    """Continues and scores texts.

    Args:
        model: The rank's part of a :class:`~megatron_lightning.models.GPTModel`, or of a module
            with the same arguments.
        part: Description of the part.
        context: Groups of this rank.
        executor: Runs the stages.
        longest: Most input tokens of the model.
        options: Sizes.
        stops: Token ids at the end of a text.
        decode: Returns the text of token ids. Required for stop strings.
        keeps_cache: Whether memory for keys stays allocated between calls.
        forward_context: Returns the context of a forward, such as autocast.
        prepare: Called before the first forward of a call.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        context: ParallelContext,
        executor: PipelineExecutor,
        *,
        longest: int,
        options: EngineOptions | None = None,
        stops: Sequence[int] = (),
        decode: Decode | None = None,
        keeps_cache: bool = True,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(
            model,
            context,
            RequestMaker(
                longest=longest,
                longest_short=_longest_short(model),
                stops=frozenset(stops),
                decode=decode,
            ),
            uses_inference_mode=part.units is None,
            forward_context=forward_context,
            prepare=prepare,
        )
        self.part = part
        self.options = options or EngineOptions()
        self._recorder = (
            RouteRecorder(getattr(model, "config", None), context)
            if self.options.record_routes
            else None
        )
        self._drafter = make_drafter(
            model, self.options, part.partition, in_lockstep=self.steps_together
        )
        self._runner = StageRunner(model, part, context, executor)
        self._keeps_cache = keeps_cache
        self._num_slots: int | None = None
        self._cache: KeyCache | None = None
        self._has_states = False
        self._scheduler: Scheduler | None = None
        self.num_steps = 0
        """Number of steps run so far."""

    @classmethod
    def load(
        cls,
        checkpoint: str | os.PathLike[str],
        layout: ParallelLayout | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine for the model in a checkpoint of any layout. A collective.

        Args:
            checkpoint: Checkpoint directory, plain Lightning ``.ckpt`` file, Hugging Face folder,
                or Hub id.
            layout: Sizes for the processes connected by ``torch.distributed``. Further processes
                are replicas, with different requests. None: this process alone.
            options: ``adapters`` (folder of ``peft``, or checkpoint), ``options``
                (:class:`EngineOptions`), ``device`` ("cpu"), ``dtype`` of the weights ("float32",
                "bfloat16" or "float16", default torch's), ``pipeline_schedule``, ``stops`` (token
                ids at the end of a text, default from the model's generation configuration),
                ``decode``.

        Raises:
            CheckpointError: On every rank, if the checkpoint cannot be read or holds another model.
            ConfigError: If model, layout and processes do not fit together.
        """
        from megatron_lightning.inference.commands.load import load_engine

        engine = load_engine(checkpoint, layout, **options)
        if not isinstance(engine, cls):
            raise ConfigError(
                f"{checkpoint} holds a {type(engine.model).__name__}, which has no rules as a "
                "GPTModel and writes by its own generate. Call "
                "megatron_lightning.inference.load_engine."
            )
        return engine

    @classmethod
    def of(cls, model: GPTModel, **options: Any) -> Engine:
        """Return an engine for a full model in this process.

        Args:
            model: The model.
            options: ``options`` (:class:`EngineOptions`), ``stops`` (token ids at the end of a
                text), ``decode``, and further arguments of the class.
        """
        context = ParallelContext(ParallelLayout(), device=_device_of(model), alone=True)
        names = tuple(model.state_dict())
        part = describe_part(model, names, sum(p.numel() for p in model.parameters()), None, None)
        executor = PipelineExecutor(context, Placement.loop(1))
        longest = model.config.max_sequence_length
        return cls(model, part, context, executor, longest=longest, **options)

    def run(self, requests: Sequence[Request], observe: Observe = lambda _: None) -> None:
        """Run requests to their ends. A collective of the replica, and of all replicas stepping
        together.
        """
        for request in requests if self._recorder is not None else ():
            check_recorded(request)
        with self.active() as scheduler:
            for request in requests:
                scheduler.add(request)
            while self.is_busy():
                self.step()
                observe(requests)
        if self._recorder is not None:
            self._recorder.finish(requests)

    @contextmanager
    def active(self) -> Iterator[Scheduler]:
        """Context for calls of :meth:`step`, or for several calls with the same weights: keys of
        their texts are kept for later calls. Yields the scheduler. The scheduler's requests and
        kept texts are forgotten at the end.
        """
        if self._scheduler is not None:
            try:
                yield self._scheduler
            except BaseException:
                self._scheduler.abort_all()
                raise
            return
        with self._writing():
            cache = self._allocate()
            allocator: Allocator
            has_states = self._has_states
            # Kernels over pages need slots in blocks. Others read a request's slots as one run.
            if self._has_pages:
                size = self.options.block_size
                allocator = Pages(cache.num_slots, size, has_states=has_states)
            else:
                allocator = Runs(cache.num_slots, has_states=has_states)
            scheduler = self._scheduler = Scheduler(
                allocator,
                max_tokens=self.options.max_tokens,
                max_requests=self.options.max_requests,
                num_drafts=self.options.draft_tokens,
                counts=self.draft_counts,
                keeps_prefixes=self._keeps_prefixes,
                prefix_counts=self.prefix_counts,
            )
            try:
                yield scheduler
            finally:
                self._scheduler = None
                if not self._keeps_cache:
                    self._cache = None

    @property
    def _has_pages(self) -> bool:
        storage = self.options.storage
        return storage == "pages" or (storage == "auto" and self.context.device.type == "cuda")

    @property
    def _keeps_prefixes(self) -> bool:
        # Recorded routes of tokens whose keys are another text's would be unknown, and a state
        # cannot be cut at an earlier token.
        return self.options.prefix_cache and self._recorder is None and not self._has_states

    def is_busy(self) -> bool:
        """Return whether a request of this replica, or of the replicas stepping together, has not
        ended. A collective for replicas stepping together.
        """
        busy = self._scheduler is not None and self._scheduler.num_requests > 0
        if not self.steps_together:
            return busy
        flag = torch.tensor(int(busy), device=self.context.device)
        return bool(all_reduce(flag, self.context.axis("world"), "max"))

    def step(self, most_steps: int = 8) -> None:
        """Compute a step. Under a pipeline compute up to ``most_steps`` steps, with groups of
        requests following one another through the stages.
        """
        scheduler, cache = self._scheduler, self._cache
        if scheduler is None or cache is None:
            raise ConfigError("step was called outside of active(). Call it in that context.")
        num_groups = num_steps = 1
        if self._runner.num_ranks > 1 and not self.steps_together:
            num_groups = max(1, min(self._runner.num_ranks, scheduler.num_requests))
            # Powers of two: a table is made for each number.
            limit = min(most_steps, scheduler.most_steps)
            num_steps = 1 << (limit.bit_length() - 1)
        scheduler.set_groups(num_groups)
        drafter = self._drafter
        keeps_states = drafter is not None
        allocator, recorder = scheduler.allocator, self._recorder
        steps = Steps(cache, allocator, self.context, recorder, keeps_states=keeps_states)
        rounds = Rounds(scheduler, steps, self.context, num_groups, drafter)
        self._runner.run(num_groups * num_steps, rounds.call, rounds.finish, group_size=num_groups)
        rounds.end()
        if self._recorder is not None:
            self._recorder.collect()
        self.num_steps += num_steps

    def _allocate(self) -> KeyCache:
        """Return the cache, as large as options and memory allow. The first call is a collective of
        all ranks, and computes a step of padding.
        """
        if self._num_slots is None:
            # A step of padding shows what each layer stores for a token, whatever layers the model
            # has.
            trial = KeyCache(1)
            drafter = self._drafter
            steps = Steps(trial, Runs(1), self.context, keeps_states=drafter is not None)
            call = steps.padding()

            def finish(_: int, __: Tensor) -> None:
                if drafter is not None:
                    drafter.draft(Batch(), call, torch.empty(0, NUM_RESULTS))

            self._runner.run(1, lambda _: call, finish)
            sizes = (trial.bytes_per_slot, trial.bytes_per_row)
            # All ranks use the size of the fullest rank, since slots have the same numbers on all.
            size = torch.tensor(sizes, device=self.context.device)
            per_slot, per_row = all_reduce(size, self.context.axis("world"), "max").tolist()
            self._has_states = per_row > 0
            # A model without attention keeps no keys.
            fitting = self._bytes_of_keys(per_row) // max(per_slot, 1)
            block = self.options.block_size if self._has_pages else 1
            num_wanted = self.options.max_requests * -(-self.longest // block) * block
            if self._keeps_prefixes:
                num_wanted *= 2
            self._num_slots = block + min(fitting, num_wanted) // block * block
        if self._cache is None:
            self._cache = KeyCache(self._num_slots)
        return self._cache

    def _bytes_of_keys(self, bytes_per_row: int) -> int:
        """Return the bytes of the cache beside the states of all requests.

        Raises:
            ConfigError: If the states alone exceed the cache.
        """
        gib, number = self.options.cache_gib, self.options.max_requests
        states = number * bytes_per_row
        if states > gib * 2**30:
            raise ConfigError(
                f"cache_gib is {gib}, and the states of max_requests={number} requests need "
                f"{states / 2**30:.2f} GiB. Raise cache_gib, or lower max_requests."
            )
        return int(gib * 2**30) - states


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _longest_short(model: nn.Module) -> int | None:
    """Return the most tokens of a text before the keys of all its tokens are others."""
    config = getattr(model, "config", None)
    return config.longest_short_document if isinstance(config, TransformerConfig) else None
