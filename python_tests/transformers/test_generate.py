"""The decode loop: logits against the decoder in NumPy, ragged batches, chunks, stops, sampling, refused models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.kv_cache_decode_loop import Sampling, choose, generate
from onnxruntime.transformers.kv_cache_decoder import DecodeSession
from onnxruntime.transformers.kv_cache_inputs import DecodeError, as_float32
from onnxruntime.transformers.quantized_kv_cache import CacheError

from python_tests.transformers.decoders import KINDS, QUANTIZED, TINY, open_tiny, random_ids, tiny_weights, write_tiny
from python_tests.transformers.small_decoder.network import forward

PROMPTS = [random_ids(9), random_ids(2, 1), random_ids(13, 2)]
# Logits reach 8. What a cache kind may change of them; 0.02 for half activations.
LOGIT_ERROR = {
    "float": 1e-4, "int8": 0.1, "fp8": 0.6, "int4": 2.0, "int8-channel-token": 0.4, "int4-tensor": 4.0,
    "int8-and-float": 0.1,
}  # fmt: skip


def expected_logits(ids: list[int]) -> np.ndarray[Any, Any]:
    """(T, V) of the decoder in NumPy."""
    return np.asarray(forward(tiny_weights(), TINY, np.array([ids]))[0][0])


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, half: bool, tmp_path: Path) -> None:
    """A prompt, steps and a burst give the logits of one NumPy pass, up to what the cache kind loses."""
    ids = random_ids(24)
    expected, bound = expected_logits(ids), LOGIT_ERROR[kind] + 0.05 * half
    session = open_tiny(tmp_path, kind, half=half)
    np.testing.assert_allclose(session.prompt([ids[:10]])[0], expected[9], rtol=0, atol=bound)
    for i in range(10, 16):
        np.testing.assert_allclose(session.step([ids[i]])[0], expected[i], rtol=0, atol=bound)
    np.testing.assert_allclose(session.burst([ids[16:]])[0], expected[16:], rtol=0, atol=bound)
    assert session.cache.lengths.tolist() == [24]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch(kind: str, tmp_path: Path) -> None:
    """Entries of a batch get what each would get alone."""
    batch = open_tiny(tmp_path, kind, batch=3)
    together = generate(batch, PROMPTS, 12)
    for entry, prompt in enumerate(PROMPTS):
        alone = generate(open_tiny(tmp_path, kind), [prompt], 12)
        assert together.tokens[entry] == alone.tokens[0], entry
    assert batch.cache.lengths.tolist() == [len(p) + 11 for p in PROMPTS]
    assert (together.prompt_tokens, len(together.step_seconds)) == (24, 11)


@pytest.mark.parametrize("chunk", [1, 4, 5, 13])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_ragged_chunks(kind: str, chunk: int, tmp_path: Path) -> None:
    """Chunks of a ragged batch leave the bytes of each entry's own chunks, also where a short entry ends early."""
    # Without room for padding beyond the longest entry.
    batch = open_tiny(tmp_path, kind, batch=3, capacity=14)
    logits = batch.prompt(PROMPTS, chunk)
    assert batch.cache.lengths.tolist() == [len(p) for p in PROMPTS]
    for entry, prompt in enumerate(PROMPTS):
        alone = open_tiny(tmp_path, kind, capacity=14)
        np.testing.assert_allclose(alone.prompt([prompt], chunk)[0], logits[entry], rtol=0, atol=1e-4)
        for tensor in alone.cache.tensors:
            rows = [s.cache.rows(tensor.past, e) for s, e in ((alone, 0), (batch, entry))]
            if tensor.is_scale:
                np.testing.assert_allclose(rows[0].view(np.float32), rows[1].view(np.float32), rtol=1e-4)
            else:
                assert (rows[0] != rows[1]).mean() < 0.02


def errors_of_ragged_steps(session: DecodeSession, chunk: int) -> tuple[float, float]:
    """RMS, against NumPy's logits, of a ragged prompt and 8 steps of which one entry skips some; and of NumPy's logits
    one token before, which is what a lost token leaves.
    """
    more = [random_ids(8, 10 + entry) for entry in range(3)]
    expected = [expected_logits(prompt + tail) for prompt, tail in zip(PROMPTS, more, strict=True)]
    session.reset()
    logits, done = session.prompt(PROMPTS, chunk), [0, 0, 0]
    errors, lost = [], []
    for step in range(8):
        last = [len(prompt) + d - 1 for prompt, d in zip(PROMPTS, done, strict=True)]
        wanted = np.stack([rows[i] for rows, i in zip(expected, last, strict=True)])
        errors.append(logits - wanted)
        lost.append(np.stack([rows[i - 1] for rows, i in zip(expected, last, strict=True)]) - wanted)
        active = np.array([True, step % 3 != 1, True])
        found = session.step([more[entry][done[entry]] for entry in range(3)], active)
        logits = np.where(active[:, None], found, logits)
        done = [d + int(a) for d, a in zip(done, active, strict=True)]
    assert session.cache.lengths.tolist() == [len(p) + d for p, d in zip(PROMPTS, done, strict=True)]
    rms = [float(np.sqrt(np.mean(np.square(x)))) for x in (errors, lost)]
    return rms[0], rms[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch_on_the_gpu(kind: str, cuda: object, tmp_path: Path) -> None:
    """A ragged prompt, at once and in chunks, then captured steps: as near to NumPy's logits as the CPU's operator."""
    on_gpu = open_tiny(tmp_path, kind, half=True, device="cuda", batch=3)
    on_cpu = open_tiny(tmp_path, kind, half=True, batch=3)
    for chunk in (0, 4) if kind in QUANTIZED else (0,):
        own, lost = errors_of_ragged_steps(on_cpu, chunk)
        bound = 1.5 * own + 0.01
        assert bound < lost, "a lost token would pass"
        assert errors_of_ragged_steps(on_gpu, chunk)[0] <= bound


def test_chunks_that_an_operator_does_not_take(tmp_path: Path) -> None:
    """Float caches take chunks of one entry; more entries are refused by the node's name, but for single tokens."""
    for kind in ("float", "int8-and-float"):
        batch = open_tiny(tmp_path, kind, batch=3)
        with pytest.raises(DecodeError, match=r"layers\.\d/GroupQueryAttention.*Use chunk=1"):
            batch.prompt(PROMPTS, 4)
        batch.reset()
        single = batch.prompt(PROMPTS, 1)
        for entry, prompt in enumerate(PROMPTS):
            one = open_tiny(tmp_path, kind).prompt([prompt], 4)
            np.testing.assert_allclose(single[entry], one[0], rtol=0, atol=LOGIT_ERROR[kind])


def test_full_cache_with_a_waiting_entry(tmp_path: Path) -> None:
    """An entry that fills the cache to its last row waits unchanged while another one's prompt goes on."""
    session = open_tiny(tmp_path, "int8", batch=2, capacity=14)
    session.prompt([random_ids(13), random_ids(2, 1)])
    logits = session.prompt([[5], random_ids(9, 3)], 4)
    alone = open_tiny(tmp_path, "int8", capacity=14)
    alone.prompt([random_ids(13)])
    np.testing.assert_allclose(alone.step([5])[0], logits[0], rtol=0, atol=0.05)
    assert session.cache.lengths.tolist() == [14, 11]
    rows = [s.cache.rows("past_key_values.0.key") for s in (session, alone)]
    np.testing.assert_array_equal(*rows)


def test_stop_tokens(tmp_path: Path) -> None:
    """An entry that stops keeps its cache; the others get what they would have got."""
    free = generate(open_tiny(tmp_path, "int8", batch=3), PROMPTS, 12)
    stop = free.tokens[0][4]
    session = open_tiny(tmp_path, "int8", batch=3)
    done = generate(session, PROMPTS, 12, stop_ids=[stop])
    for entry, tokens in enumerate(free.tokens):
        wanted = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert done.tokens[entry] == wanted
        # The last token is never appended.
        assert session.cache.lengths[entry] == len(PROMPTS[entry]) + len(wanted) - 1


def test_what_does_not_fit(tmp_path: Path) -> None:
    """Prompts, new tokens, steps and bursts beyond the capacity, and prompts of the wrong number."""
    session = open_tiny(tmp_path, "int8", capacity=16)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: session.prompt([random_ids(17)]), "would make 17 tokens; the cache has room for 16"),
        (lambda: generate(session, [random_ids(10)], 8), "8 new tokens make 17; the cache has room for 16"),
        (lambda: session.prompt([[1], [2]]), r"2 prompts of \[1, 1\] tokens: wants 1"),
        (lambda: session.prompt([[]]), "none empty"),
        (lambda: session.prompt([[256]]), "token 256"),
        (lambda: session.burst([random_ids(16)]), "needs room beyond it"),
    ]
    for call, reason in calls:
        with pytest.raises(DecodeError, match=reason):
            call()
        assert session.cache.lengths.tolist() == [0]
    session.prompt([random_ids(16)])
    with pytest.raises(CacheError, match=r"1 more tokens do not fit: lengths \[16\], capacity 16"):
        session.step([1])


def test_sampling() -> None:
    """Greedy, top-k, top-p, temperature, seeds; frequencies follow the probabilities."""
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    draws = {
        name: [int(choose(logits, s, rng)[0]) for rng in [np.random.default_rng(3)] for _ in range(2000)]
        for name, s in {
            "plain": Sampling(1.0), "k": Sampling(1.0, top_k=2), "p": Sampling(1.0, top_p=0.7), "cold": Sampling(0.01),
            "hot": Sampling(100.0), "first": Sampling(1.0, top_p=1e-6),
        }.items()
    }  # fmt: skip
    share = {name: np.bincount(d, minlength=4) / 2000 for name, d in draws.items()}
    np.testing.assert_allclose(share["plain"], [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(share["k"], [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share["p"], [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share["hot"], [0.25] * 4, atol=0.03)
    assert set(draws["cold"]) == set(draws["first"]) == {0}
    assert choose(logits[:, ::-1], Sampling(), np.random.default_rng(0)).tolist() == [3]
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match="wants temperature"):
            Sampling(**wrong)
    with pytest.raises(DecodeError, match="batch entry 1 are NaN"):
        choose(np.array([[0, 1], [0, np.nan]], np.float32), Sampling(), np.random.default_rng(0))


def test_seeds(tmp_path: Path) -> None:
    """A seed repeats itself, and another one does not."""
    runs = [
        generate(open_tiny(tmp_path, "int8"), [PROMPTS[0]], 20, sampling=Sampling(1.5, seed=seed)).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def with_lengths_as_inputs(path: Path, positions: bool) -> Path:
    """The model with seqlens_k and total_sequence_length as graph inputs instead of a mask; position_ids unused."""
    model = onnx.load(path)
    nodes = [
        n
        for n in model.graph.node
        if not set(n.input) & {"attention_mask", "tokens", "tokens_less_one", "mask_shape", "mask_columns"}
    ]
    inputs = [i for i in model.graph.input if i.name != "attention_mask"]
    inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch_size"]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]))
    if positions:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch_size", "S"]))
        dims = ["batch_size", "S"]
        model.graph.output.append(helper.make_tensor_value_info("positions", TensorProto.INT64, dims))
        nodes.append(helper.make_node("Identity", ["position_ids"], ["positions"]))
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(nodes)
    model.graph.input.extend(inputs)
    changed = path.with_name(f"lengths-{positions}.onnx")
    onnx.save(model, changed)
    return changed


@pytest.mark.parametrize("positions", [False, True])
def test_lengths_as_graph_inputs(positions: bool, tmp_path: Path) -> None:
    """A model without a mask gets the same tokens."""
    path = with_lengths_as_inputs(write_tiny(tmp_path, "int8"), positions)
    session = DecodeSession(path, capacity=48, batch=3, threads=1)
    masked = open_tiny(tmp_path, "int8", batch=3)
    assert generate(session, PROMPTS, 8, chunk=4).tokens == generate(masked, PROMPTS, 8, chunk=4).tokens


def test_models_that_cannot_be_fed(tmp_path: Path) -> None:
    """Unknown inputs, missing ones, logits of unknown width, graphs without CUDA: by name."""
    model = onnx.load(write_tiny(tmp_path, "int8"))
    model.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["B", 3]))
    onnx.save(model, tmp_path / "image.onnx")
    with pytest.raises(DecodeError, match=r"pixel_values \['B', 3\]: not one of input_ids"):
        DecodeSession(tmp_path / "image.onnx", capacity=8)
    del model.graph.input[-1]
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "V"
    onnx.save(model, tmp_path / "width.onnx")
    with pytest.raises(DecodeError, match=r"logits \[.*'V'\]: wants float logits"):
        DecodeSession(tmp_path / "width.onnx", capacity=8)
    with pytest.raises(DecodeError, match="graphs are CUDA's"):
        open_tiny(tmp_path, "int8", captured=True)


def test_rotary_table_shorter_than_the_capacity(tmp_path: Path) -> None:
    """Refused by the shortest table of a layer, from its shape alone: the weights need not be there."""
    for kind in ("float", "int8"):
        path = write_tiny(tmp_path, kind, positions=32)
        filled = DecodeSession(path, capacity=32, threads=1)
        filled.prompt([random_ids(31)])
        filled.step([1])
        with pytest.raises(
            DecodeError, match=r"^capacity 33 .* /layers\.0/G.* has 32 rows\. Give a smaller --capacity"
        ):
            DecodeSession(path, capacity=33, threads=1)
    model = onnx.load(path)
    short = numpy_helper.from_array(np.ones((16, TINY.head_size // 2), np.float32), "short_table")
    model.graph.initializer.append(short)
    last = next(n for n in reversed(model.graph.node) if n.op_type == "GroupQueryAttention")
    last.input[7] = "short_table"
    external = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(model, tmp_path / "short.onnx", **external)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(DecodeError, match=r"^capacity 17 .* /layers\.1/G.* has 16 rows"):
        DecodeSession(tmp_path / "short.onnx", capacity=17, threads=1)


def test_as_float32() -> None:
    """Logits of the three types from their bytes."""
    values = np.array([[1.5, -2.0, 0.0, 3.0]], np.float32)
    half = values.astype(np.float16)
    bfloat = (values.view(np.uint32) >> 16).astype(np.uint16)
    for array, kind in ((values, TensorProto.FLOAT), (half, TensorProto.FLOAT16), (bfloat, TensorProto.BFLOAT16)):
        np.testing.assert_array_equal(as_float32(array.view(np.uint8), int(kind)), values)
