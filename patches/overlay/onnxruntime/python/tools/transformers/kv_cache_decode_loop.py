# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Generation and perplexity over a DecodeSession: which token comes next, how long it took, how surprised the model is.

session = DecodeSession("model.onnx", capacity=2100, device="cuda")
done = generate(session, [[1, 2, 3]], 2000)
done.tokens, done.step_seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kv_cache_decoder import MAX_CAPTURED_TOKENS, DecodeSession
from .kv_cache_inputs import DecodeError

F32 = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 takes the likeliest. top_k, top_p: keep the k likeliest tokens, then the
    fewest whose probability reaches p; 0 and 1 keep all. Raises ValueError for numbers without a meaning.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            msg = f"{self}: wants temperature >= 0, top_k >= 0, 0 < top_p <= 1"
            raise ValueError(msg)


@dataclass(frozen=True)
class Generation:
    """tokens: new ones per batch entry, the stop token included. Seconds: wall time of calls, the choice included."""

    tokens: list[list[int]]
    prompt_tokens: int
    prompt_seconds: float
    step_seconds: list[float]


@dataclass(frozen=True)
class Perplexity:
    """nats: mean negative log likelihood of a token. tokens: how many were predicted. window: longest context."""

    nats: float
    tokens: int
    window: int

    @property
    def value(self) -> float:
        """exp(nats)."""
        return float(np.exp(self.nats))


def choose(logits: F32, sampling: Sampling, rng: np.random.Generator) -> Ids:
    """Tokens (B,) from logits (B, V). Raises DecodeError where logits are NaN: a length that did not fit, usually."""
    bad = np.flatnonzero(np.isnan(logits).any(-1))
    if bad.size:
        msg = f"logits of batch entry {bad[0]} are NaN: a value of the cache is not finite, or a length did not fit it"
        raise DecodeError(msg)
    if sampling.temperature == 0:
        return np.asarray(logits.argmax(-1), np.int64)
    return np.array([_draw(row, sampling, rng) for row in logits.astype(np.float64)], np.int64)


def _draw(row: NDArray[np.float64], sampling: Sampling, rng: np.random.Generator) -> int:
    order = np.argsort(-row, kind="stable")[: sampling.top_k or None]
    weights = np.exp((row[order] - row[order[0]]) / sampling.temperature)
    weights /= weights.sum()
    # A token stays if those before it have not reached p.
    kept = np.cumsum(weights) - weights < sampling.top_p
    kept[0] = True
    weights = weights[kept]
    return int(order[kept][rng.choice(len(weights), p=weights / weights.sum())])


def generate(
    session: DecodeSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    chunk: int = 0,
    after_prompt: Callable[[], Any] | None = None,
) -> Generation:
    """Append prompts (one token list per entry) to what the cache holds and continue each by up to max_new_tokens.

    An entry that has chosen a stop token waits for the others; its cache does not grow. after_prompt is called when
    the cache holds the prompts and nothing else. The last token chosen is not appended. Raises DecodeError where the
    cache has no room for all of it.
    """
    sampling = sampling or Sampling()
    rng = np.random.default_rng(sampling.seed)
    needed = int((session.cache.lengths + [len(p) for p in prompts]).max()) + max_new_tokens - 1
    if needed > session.capacity:
        msg = f"{max_new_tokens} new tokens make {needed}; the cache has room for {session.capacity}. Allocate more"
        raise DecodeError(msg)
    started = time.perf_counter()
    chosen = choose(session.prompt(prompts, chunk), sampling, rng)
    prompt_seconds = time.perf_counter() - started
    if after_prompt is not None:
        after_prompt()
    tokens: list[list[int]] = [[int(t)] for t in chosen]
    active = np.array([t[-1] not in stop_ids for t in tokens])
    seconds: list[float] = []
    while active.any() and len(seconds) < max_new_tokens - 1:
        started = time.perf_counter()
        chosen = choose(session.step(chosen, active), sampling, rng)
        seconds.append(time.perf_counter() - started)
        for entry in np.flatnonzero(active):
            tokens[entry].append(int(chosen[entry]))
            active[entry] = tokens[entry][-1] not in stop_ids
    return Generation(tokens, sum(map(len, prompts)), prompt_seconds, seconds)


def perplexity(
    session: DecodeSession, ids: Ids, *, window: int = 0, tokens_per_step: int = MAX_CAPTURED_TOKENS
) -> Perplexity:
    """How well the model predicts tokens (T,), in windows that start with an empty cache each.

    A prompt attends to exact keys and values, which no cache kind changes. So the text goes in by calls of
    tokens_per_step that are no prompts: all of them read the quantized cache, their own tokens included. window:
    tokens of a context, less than the capacity (default: one less). Raises DecodeError.
    """
    window = window or session.capacity - 1
    if session.batch != 1 or not 0 < window < session.capacity or tokens_per_step < 1 or len(ids) < 2:
        msg = (
            f"batch {session.batch}, window {window}, capacity {session.capacity}, {tokens_per_step} tokens a step, "
            f"{len(ids)} tokens: wants batch 1, window < capacity, at least one token a step and two of text"
        )
        raise DecodeError(msg)
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        session.reset()
        end = min(start + window, len(ids) - 1)
        for first in range(start, end, tokens_per_step):
            last = min(first + tokens_per_step, end)
            logits = session.burst(ids[None, first:last])[0].astype(np.float64)
            total += float(_surprise(logits, ids[first + 1 : last + 1]).sum())
            count += last - first
    return Perplexity(total / count, count, min(window, len(ids) - 1))


def _surprise(logits: NDArray[np.float64], targets: Ids) -> NDArray[np.float64]:
    """Nats (S,) of targets (S,) under logits (S, V)."""
    top = logits.max(-1)
    picked = np.take_along_axis(logits, targets[:, None], -1)[:, 0]
    surprise: NDArray[np.float64] = np.log(np.exp(logits - top[:, None]).sum(-1)) + top - picked
    return surprise
