"""Text and scores by a model's own ``generate``: models of ``transformers`` not supported by the
engine.

Each text is computed alone, with the model's own cache, on every rank. Tokens are drawn as in the
engine, so that a seed gives the same text on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.request_batch import Batch, Portion, Request
from megatron_lightning.inference.engine.requests import RequestMaker
from megatron_lightning.inference.engine.text_model import Observe, TextModel
from megatron_lightning.inference.engine.token_choice import choose
from megatron_lightning.parallel.grid.context import ParallelContext

_NO_TOKEN = 1 << 30  # transformers warns of -1


class OwnGenerate(TextModel):
    """Continues and scores texts as
    :class:`~megatron_lightning.inference.engine.text_engine.Engine` does. All ranks compute all
    texts, since a forward may be a collective of all.

    Args:
        model: A rank's part of a model of ``transformers``.
        context: Groups of this rank.
        requests: Makes requests.
        uses_inference_mode: Must be False for weights gathered by FSDP, since weights gathered in
            inference mode could not be trained.
        forward_context: Returns the context of a forward, such as autocast.
        prepare: Called before the first forward of a call.

    Raises:
        ConfigError: If ranks share layers or sequences.
    """

    def __init__(
        self,
        model: Any,
        context: ParallelContext,
        requests: RequestMaker,
        *,
        uses_inference_mode: bool = True,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        layout = context.layout
        for name, size in (
            ("pipeline_model_parallel_size", layout.pp),
            ("context_parallel_size", layout.cp),
        ):
            if size > 1:
                raise ConfigError(
                    f"{name}={size}: {type(model).__name__} writes text by its own generate, which "
                    f"calls the whole model for each token. Set {name} to 1, load the checkpoint "
                    "in another layout, or train a GPTLightningModule(init_from_hf=...), whose "
                    "engine writes texts on every layout."
                )
        super().__init__(
            model,
            context,
            requests,
            uses_inference_mode=uses_inference_mode,
            forward_context=forward_context,
            prepare=prepare,
        )

    def run(self, requests: Sequence[Request], observe: Observe = lambda _: None) -> None:
        """Run requests to their ends. All ranks pass the same requests."""
        with self._writing():
            for request in requests:
                if request.num_scored:
                    self._score(request)
                else:
                    self._continue(request, lambda: observe(requests))
                observe(requests)

    def add_images(self, request: Request, entries: Mapping[str, Any] | None) -> None:
        """See :class:`TextModel`."""
        dtype = next(self.model.parameters()).dtype
        request.entries = {
            name: value.to(self.context.device, dtype if value.is_floating_point() else None)
            for name, value in (entries or {}).items()
        }

    def _score(self, request: Request) -> None:
        total = request.num_inputs
        portion = Portion(request, 0, total)
        row = request.tokens[request.offset : request.offset + total]
        logits = self.model(input_ids=torch.tensor([row], device=self.context.device)).logits
        kept_logits = logits[0, portion.kept.start :]
        request.take([(a, b, c) for a, b, c in choose(Batch((portion,)), kept_logits).tolist()])

    def _continue(self, request: Request, tell: Callable[[], object]) -> None:
        if request.prompt_length + request.sampling.max_new_tokens > self.longest:
            raise ConfigError(
                f"a prompt of {request.prompt_length} tokens with up to "
                f"{request.sampling.max_new_tokens} new ones is longer than the {self.longest} of "
                f"{type(self.model).__name__}. Shorten the prompt, or lower max_new_tokens."
            )
        row = torch.tensor([request.tokens], device=self.context.device)

        # The request draws, so that seeds and log-probabilities are ours. generate then takes the
        # only token left.
        def draw(_: Tensor, logits: Tensor) -> Tensor:
            """Leave a single token: the token drawn by the request."""
            last = request.num_inputs
            portion = Portion(request, last - 1, last)
            [result] = choose(Batch((portion,)), logits).tolist()
            request.take([(result[0], result[1], result[2])])
            tell()
            only = torch.full_like(logits, -torch.inf)
            only[:, int(result[0])] = 0.0
            return only

        def is_done(*_: Any, **__: Any) -> Tensor:
            return torch.tensor([request.reason is not None], device=row.device)

        self.model.generate(
            row,
            **request.entries,
            attention_mask=torch.ones_like(row),  # a prompt may hold the padding's id
            logits_processor=[draw],
            stopping_criteria=[is_done],
            max_new_tokens=request.sampling.max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=1.0,
            eos_token_id=_NO_TOKEN,  # requests know their ends
            pad_token_id=0,
            use_cache=True,
        )
