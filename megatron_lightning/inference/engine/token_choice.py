"""Choose tokens by logits, and score tokens, for the requests of a step.

Shapes: ``k`` places with wanted logits, ``v`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.inference.engine.request_batch import Batch, Portion
from megatron_lightning.inference.engine.uncached_loop import draw

NUM_RESULTS = 3
"""Numbers of a place: token, log-probability, log-probability of the best token."""


def choose(batch: Batch, logits: Tensor) -> Tensor:
    """Return the results [k, 3] of a step, in fp64 on the CPU, so that token ids are exact.

    For a generating request, a place has the drawn token, the log-probability of the drawn token,
    and the log-probability of the best token. For a scored request, a place has the best token, the
    log-probability of the text's own next token, and the log-probability of the best token. Places
    behind a draft that differs from the chosen token have the token -1. Log-probabilities are
    computed from the logits divided by the temperature, before top-k and top-p. Logits that are not
    finite give NaN, and the request fails alone.

    Args:
        batch: The requests. The requests' generators are advanced.
        logits: [k, v] of any floating dtype and device.
    """
    # Greedy requests (temperature 0) report log-probabilities of the plain logits.
    temperatures = [
        portion.request.sampling.temperature or 1.0
        for portion in batch.portions
        for _ in portion.kept
    ]
    scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    normalizer = scaled.logsumexp(-1)
    best_logits, best = scaled.max(-1)
    # One transfer for all greedy tokens, and one for drawn tokens.
    tokens = best.tolist()
    judged = list(tokens)
    drawn = _drawn(batch, logits)
    place = 0
    for portion in batch.portions:
        follows_text = True
        # Drafts are judged in order: behind the first refused draft, results belong to no text.
        for offset in portion.kept:
            if portion.request.num_scored:
                judged[place] = _next_token(portion, offset)
            elif not follows_text:
                tokens[place] = -1
            elif portion.request.sampling.temperature:
                request = portion.request
                tokens[place] = (
                    drawn[place]
                    if place in drawn
                    else request.sampling.choose(logits[place], request.generator)
                )
                judged[place] = tokens[place]
            follows_text = follows_text and portion.takes(offset + 1, tokens[place])
            place += 1
    chosen = scaled.gather(1, torch.tensor(judged, device=logits.device)[:, None])[:, 0]
    results = torch.stack((chosen - normalizer, best_logits - normalizer), 1).double().cpu()
    return torch.cat((torch.tensor(tokens, dtype=torch.float64)[:, None], results), 1)


def _drawn(batch: Batch, logits: Tensor) -> dict[int, int]:
    """Return place -> drawn token, of requests with a single place. A draw behind a draft waits
    for the draft's judgment.
    """
    places, requests, place = [], [], 0
    for portion in batch.portions:
        request, count = portion.request, len(portion.kept)
        if count == 1 and request.sampling.temperature and not request.num_scored:
            places.append(place)
            requests.append(request)
        place += count
    if not places:
        return {}
    samplings = [request.sampling for request in requests]
    generators = [request.generator for request in requests]
    return dict(zip(places, draw(logits[places], samplings, generators), strict=True))


def _next_token(portion: Portion, place: int) -> int:
    request = portion.request
    return request.tokens[request.offset + place + 1]
