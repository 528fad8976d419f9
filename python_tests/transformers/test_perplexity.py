"""The small decoder with its committed weights: training's gradient, perplexity by cache kind, outlier channels."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from onnxruntime.transformers.kv_cache_decode_loop import Perplexity, generate, perplexity
from onnxruntime.transformers.kv_cache_decoder import DecodeSession
from onnxruntime.transformers.kv_cache_inputs import DecodeError

from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.transformers import installed
from python_tests.transformers.decoders import open_tiny, random_ids
from python_tests.transformers.small_decoder import outlier_study, text
from python_tests.transformers.small_decoder.export import CacheKind, largest_values, load_weights
from python_tests.transformers.small_decoder.network import (
    Shape,
    Weights,
    forward,
    initial_weights,
    loss_and_gradient,
)
from python_tests.transformers.small_decoder.perplexity_table import write_model

TOKEN, CHANNEL, TENSOR = Granularity.PER_TOKEN, Granularity.PER_CHANNEL, Granularity.PER_TENSOR
TOKENS, WINDOW = 1536, 384
# What a cache kind may add to the nats a byte of the held-out text, about twice what was measured.
ADDED_NATS = {
    CacheKind(CacheDtype.INT8): 0.001,
    CacheKind(CacheDtype.FP8): 0.005,
    CacheKind(CacheDtype.INT4): 0.05,
    CacheKind(CacheDtype.INT8, CHANNEL, TOKEN): 0.001,
    CacheKind(CacheDtype.INT8, TENSOR, TENSOR): 0.001,
    CacheKind(CacheDtype.INT4, CHANNEL, TOKEN): 0.05,
}


@lru_cache(maxsize=1)
def weights() -> Weights:
    """The committed weights."""
    return load_weights()


@lru_cache(maxsize=1)
def largest() -> dict[tuple[int, str], Array]:
    """Calibration of the committed weights."""
    return largest_values(weights(), Shape(), 256)


def held_out() -> Array:
    """The tokens that are measured."""
    return text.tokens(text.held_out_text())[: TOKENS + 1]


def open_decoder(folder: Path, kind: CacheKind | None = None, half: bool = False, **options: object) -> DecodeSession:
    """A session over the small decoder with a cache kind."""
    write_model(folder / "decoder.onnx", weights(), largest(), kind, half)
    return DecodeSession(folder / "decoder.onnx", **{"capacity": WINDOW + 1, "threads": 1, **options})


@lru_cache(maxsize=1)
def float_perplexity(folder: Path) -> Perplexity:
    """float32 caches."""
    return perplexity(open_decoder(folder), held_out())


def test_gradient() -> None:
    """The backward pass against differences of the loss, in float64, weight by weight."""
    shape = Shape(vocabulary=11, width=16, layers=2, heads=4, kv_heads=2, head_size=8, hidden=24)
    rng = np.random.default_rng(3)
    point = {n: w + rng.standard_normal(w.shape) * 0.1 for n, w in initial_weights(shape).items()}
    ids = rng.integers(0, 11, (2, 10))
    gradient = loss_and_gradient(point, shape, ids[:, :-1], ids[:, 1:])[1]
    for name, w in point.items():
        direction = rng.standard_normal(w.shape) * 1e-5
        ends = [
            loss_and_gradient({**point, name: w + sign * direction}, shape, ids[:, :-1], ids[:, 1:])[0]
            for sign in (1, -1)
        ]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2, (gradient[name] * direction).sum(), rtol=1e-5)


def test_the_decoder_has_learned(tmp_path: Path) -> None:
    """Far below the 3.3 nats of independent letters; and the loop computes the loss that NumPy does."""
    found = perplexity(open_decoder(tmp_path), held_out())
    losses = []
    for start in range(0, TOKENS, WINDOW):
        piece = held_out()[None, start : start + WINDOW + 1]
        logits = forward(weights(), Shape(), piece[:, :-1])[0].astype(np.float64)
        picked = np.take_along_axis(logits, piece[:, 1:, None], -1)[..., 0]
        losses.append(np.log(np.exp(logits).sum(-1)) - picked)
    assert found.tokens == TOKENS
    np.testing.assert_allclose(found.nats, np.concatenate(losses, axis=1).mean(), rtol=1e-4)
    assert found.nats < 2.2
    np.testing.assert_allclose(found.value, np.exp(found.nats))


@pytest.mark.parametrize("kind", ADDED_NATS, ids=lambda k: f"{k.dtype}-{k.k}-{k.v}")
def test_cache_kinds(kind: CacheKind, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each kind costs little, and each costs something: the numbers come from the quantized cache."""
    exact = float_perplexity(tmp_path_factory.getbasetemp())
    found = perplexity(open_decoder(tmp_path, kind), held_out())
    assert found.tokens == exact.tokens
    assert found.nats != exact.nats
    assert found.nats - exact.nats < ADDED_NATS[kind]


def test_a_bad_cache_is_seen(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Control: scales ten times too large cost more than any kind may."""
    exact = float_perplexity(tmp_path_factory.getbasetemp())
    kind = CacheKind(CacheDtype.INT4, CHANNEL, CHANNEL)
    write_model(tmp_path / "bad.onnx", weights(), {k: v * 10 for k, v in largest().items()}, kind, False)
    found = perplexity(DecodeSession(tmp_path / "bad.onnx", capacity=WINDOW + 1, threads=1), held_out())
    assert found.nats - exact.nats > max(ADDED_NATS.values())


@pytest.mark.parametrize("tokens_per_step", [1, 5, 40])
def test_calls_do_not_matter(tokens_per_step: int, tmp_path: Path) -> None:
    """Single tokens and bursts of any size give one perplexity: none of them is a prompt."""
    ids = np.array(random_ids(90))
    found = [
        perplexity(open_tiny(tmp_path, "int4"), ids, window=45, tokens_per_step=n).nats for n in (tokens_per_step, 16)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=2e-3)


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    """A batch, a window without room, too little text."""
    ids = np.array(random_ids(9))
    for session, tokens, window in (
        (open_tiny(tmp_path, "int8", batch=2), ids, 0),
        (open_tiny(tmp_path, "int8"), ids, 48),
        (open_tiny(tmp_path, "int8"), ids[:1], 0),
    ):
        with pytest.raises(DecodeError, match="wants batch 1, window < capacity"):
            perplexity(session, tokens, window=window)


def test_greedy_agreement(tmp_path: Path) -> None:
    """How far greedy text of an int8 cache follows that of the float cache: at least its first 16 bytes here."""
    prompt = [int(t) for t in held_out()[:128]]
    exact = generate(open_decoder(tmp_path), [prompt], 64).tokens[0]
    found = generate(open_decoder(tmp_path, CacheKind(CacheDtype.INT8)), [prompt], 64).tokens[0]
    assert found[:16] == exact[:16]


def test_command_line(tmp_path: Path) -> None:
    """The table names each model's cache and compares it with the first one's."""
    for name, kind in (("float", None), ("int8", CacheKind(CacheDtype.INT8)), ("int4", CacheKind(CacheDtype.INT4))):
        write_model(tmp_path / f"{name}.onnx", weights(), largest(), kind, False)
    book = tmp_path / "book.txt"
    book.write_bytes(text.held_out_text()[:300])
    models = [tmp_path / f"{name}.onnx" for name in ("float", "int8", "int4")]
    done = installed.run(
        "kv_cache_generate", "perplexity", *models, "--text", book, "--window", "128", "--threads", "1"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[-3:]]
    assert [r[2].strip() for r in rows] == ["float32", "int8 PER_TOKEN/PER_TOKEN", "int4 PER_TOKEN/PER_TOKEN"]
    assert [int(r[3].replace(",", "")) for r in rows] == [4 * 2 * 2 * 128, 4 * 2 * 2 * 36, 4 * 2 * 2 * 20]
    assert rows[0][6].strip() == "+0.000 %"
    assert "299 tokens predicted" in done.stdout


def test_outlier_channels() -> None:
    """Scales per token pay for outlier channels of K with every other channel; scales per channel do not notice.

    fp8 does not notice either: its step is relative to each value. All of it is arithmetic, in float64.
    """
    calm, wild = outlier_study.make_caches(1.0), outlier_study.make_caches(16.0)
    error = {
        (dtype, k): [outlier_study.output_error(c, dtype, k, TOKEN) for c in (calm, wild)]
        for dtype in CacheDtype
        for k in (TOKEN, CHANNEL)
    }
    for dtype in (CacheDtype.INT8, CacheDtype.INT4):
        assert error[dtype, TOKEN][1] > 4 * error[dtype, TOKEN][0]
        assert error[dtype, CHANNEL][1] < 1.2 * error[dtype, CHANNEL][0]
    assert error[CacheDtype.FP8, TOKEN][1] < 1.2 * error[CacheDtype.FP8, TOKEN][0]
    assert error[CacheDtype.INT8, TOKEN][0] < 0.02
    # Where there are no outliers, the token's own scale is the better one.
    assert error[CacheDtype.INT4, TOKEN][0] < error[CacheDtype.INT4, CHANNEL][0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, *ADDED_NATS], ids=str)
def test_captured_steps(kind: CacheKind | None, cuda: object, tmp_path: Path) -> None:
    """300 captured steps choose the tokens of eager ones, and perplexity is near the CPU's."""
    prompt = [int(t) for t in held_out()[:64]]
    options = {"device": "cuda", "half": True, "capacity": 512}
    done = [generate(open_decoder(tmp_path, kind, captured=c, **options), [prompt], 300).tokens for c in (True, False)]  # type: ignore[arg-type]
    assert done[0] == done[1]
    found = perplexity(open_decoder(tmp_path, kind, device="cuda", half=True), held_out())
    exact = float_perplexity(tmp_path)
    assert abs(found.nats - exact.nats) < (0.005 if kind is None else 2 * ADDED_NATS[kind] + 0.005)
