"""QuantizedKvCache: sizes, rewind, branches, saved prefixes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.transformers import kv_cache_file
from onnxruntime.transformers.kv_cache_decoder import DecodeSession
from onnxruntime.transformers.kv_cache_file import CacheFileError
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_memory import DeviceError, DeviceMemory, session_provider
from onnxruntime.transformers.kv_cache_model import read_decoder
from onnxruntime.transformers.quantized_kv_cache import CacheError, QuantizedKvCache

from python_tests.transformers.decoders import KINDS, TINY, open_tiny, random_ids, write_tiny

# Bytes of a token: 2 layers, 1 KV head of 16 elements, K and V.
BYTES_PER_TOKEN = {
    "float": 2 * 2 * 16 * 4, "int8": 2 * 2 * (16 + 4), "fp8": 2 * 2 * (16 + 4), "int4": 2 * 2 * (8 + 4),
    "int8-channel-token": 2 * (2 * 16 + 4), "int4-tensor": 2 * 2 * 8, "int8-and-float": 2 * (16 + 4) + 2 * 16 * 4,
}  # fmt: skip


def state(session: DecodeSession, entry: int = 0) -> dict[str, bytes]:
    """Every byte that the cache holds for an entry."""
    return {t.past: session.cache.rows(t.past, entry).tobytes() for t in session.cache.tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind: str, tmp_path: Path) -> None:
    """Bytes are those of codes and scales, over batch and capacity."""
    cache = QuantizedKvCache.for_model(write_tiny(tmp_path, kind), 3, 20)
    assert cache.nbytes == 3 * 20 * BYTES_PER_TOKEN[kind]
    assert cache.decoder.bytes_per_token == BYTES_PER_TOKEN[kind]
    codes = sum(t.nbytes for t in cache.tensors if not t.is_scale)
    assert cache.scale_nbytes == cache.nbytes - codes
    assert cache.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rewind_is_as_if_never_appended(kind: str, tmp_path: Path) -> None:
    """A burst of guesses is dropped; bytes, scales and later logits are those of a cache that never saw it."""
    prompt, after = random_ids(9), random_ids(6, 1)
    plain, guessed = open_tiny(tmp_path, kind), open_tiny(tmp_path, kind)
    for session in (plain, guessed):
        session.prompt([prompt])
    guessed.burst([random_ids(5, 2)])
    guessed.cache.rewind(5)
    assert state(guessed) == state(plain)
    for token in after:
        np.testing.assert_array_equal(guessed.step([token]), plain.step([token]))
    assert state(guessed) == state(plain)


@pytest.mark.parametrize("kind", ["int8", "int4", "int8-and-float"])
def test_part_of_a_burst_is_kept(kind: str, tmp_path: Path) -> None:
    """Three of five guesses were right: the cache is the one that three steps would have left."""
    prompt, guesses = random_ids(9), random_ids(5, 2)
    stepped, burst = open_tiny(tmp_path, kind), open_tiny(tmp_path, kind)
    for session in (stepped, burst):
        session.prompt([prompt])
    logits = burst.burst([guesses])
    burst.cache.rewind(2)
    for i in range(3):
        np.testing.assert_allclose(stepped.step([guesses[i]])[0], logits[0, i], rtol=0, atol=2e-3)
    assert burst.cache.lengths.tolist() == stepped.cache.lengths.tolist() == [12]


def test_clone_is_a_branch(tmp_path: Path) -> None:
    """A clone goes on alone and leaves the original alone."""
    session, other = open_tiny(tmp_path, "int8"), open_tiny(tmp_path, "int8")
    session.prompt([random_ids(9)])
    before = state(session)
    branch = session.cache.clone()
    assert {t.past: branch.rows(t.past).tobytes() for t in branch.tensors} == before
    assert branch.lengths.tolist() == [9]
    session.step([1])
    branch.rewind(4)
    assert branch.lengths.tolist() == [5]
    assert session.cache.lengths.tolist() == [10]
    other.prompt([random_ids(9)])
    other.step([1])
    assert state(session) == state(other)


@pytest.mark.parametrize("kind", ["int8", "int8-and-float"])
def test_branches_of_a_session(kind: str, tmp_path: Path) -> None:
    """Two continuations of one prompt, by turns, are those that each session alone would have made."""
    session = open_tiny(tmp_path, kind)
    session.prompt([random_ids(9)])
    branches = [session, session.branch(), session.branch()]
    alone = [open_tiny(tmp_path, kind) for _ in branches]
    for decoder in alone:
        decoder.prompt([random_ids(9)])
    for i in range(4):
        for number, (branch, decoder) in enumerate(zip(branches, alone, strict=True)):
            token = random_ids(4, number)[i]
            np.testing.assert_array_equal(branch.step([token]), decoder.step([token]))
    assert [state(branch) for branch in branches] == [state(decoder) for decoder in alone]


def test_reset(tmp_path: Path) -> None:
    """A reset cache is a new one."""
    session, fresh = open_tiny(tmp_path, "int4"), open_tiny(tmp_path, "int4")
    session.prompt([random_ids(30)])
    session.reset()
    np.testing.assert_array_equal(session.prompt([random_ids(5, 1)]), fresh.prompt([random_ids(5, 1)]))
    assert state(session) == state(fresh)


def test_lengths_are_checked(tmp_path: Path) -> None:
    """More than the capacity, less than nothing, and what is no number of tokens."""
    cache = QuantizedKvCache.for_model(write_tiny(tmp_path, "int8"), 2, 10)
    cache.advance([10, 3])
    cache.rewind([1, 0])
    for call, tokens, reason in (
        (cache.advance, 2, r"2 more tokens do not fit: lengths \[9, 3\], capacity 10"),
        (cache.rewind, 4, r"cannot drop 4 tokens: lengths \[9, 3\]"),
        (cache.rewind, -1, "number of at least 0"),
        (cache.advance, [1, 1, 1], "one per batch entry"),
        (cache.advance, 0.5, "wants a number"),
    ):
        with pytest.raises(CacheError, match=reason):
            call(tokens)
        assert cache.lengths.tolist() == [9, 3]
    with pytest.raises(CacheError, match="batch 0"):
        QuantizedKvCache.for_model(write_tiny(tmp_path, "int8"), 0, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_prefix(kind: str, tmp_path: Path) -> None:
    """A prefix goes to a file and into a larger cache, whose next logits are those of the cache that was saved."""
    ids, file = random_ids(11), tmp_path / "prefix.kv"
    session, other = open_tiny(tmp_path, kind), open_tiny(tmp_path, kind, capacity=80)
    session.prompt([ids])
    session.cache.save(file, [ids])
    assert file.stat().st_size < 11 * BYTES_PER_TOKEN[kind] + 4096
    other.prompt([random_ids(60, 5)])
    assert other.cache.load(file) == [ids]
    assert state(other) == state(session)
    np.testing.assert_array_equal(other.step([3]), session.step([3]))


def test_one_prefix_for_a_batch(tmp_path: Path) -> None:
    """A file of one entry is taken by every entry of a batch; ragged batches come back as they were."""
    file, ids = tmp_path / "prefix.kv", random_ids(11)
    one, three = open_tiny(tmp_path, "int8"), open_tiny(tmp_path, "int8", batch=3)
    one.prompt([ids])
    one.cache.save(file)
    assert three.cache.load(file) is None
    assert [state(three, entry) for entry in range(3)] == [state(one)] * 3
    three.cache.rewind([0, 4, 11])
    three.cache.save(file)
    again = open_tiny(tmp_path, "int8", batch=3)
    again.cache.load(file)
    assert again.cache.lengths.tolist() == [11, 7, 0]
    assert [state(again, entry) for entry in range(3)] == [state(three, entry) for entry in range(3)]


def test_dropped_tokens_are_not_saved(tmp_path: Path) -> None:
    """Rows beyond an entry's length are zero in the file, whatever they held."""
    session = open_tiny(tmp_path, "int8", batch=2)
    session.prompt([random_ids(8), random_ids(8, 1)])
    session.cache.rewind([0, 5])
    session.cache.save(tmp_path / "prefix.kv")
    for name, rows in kv_cache_file.read(tmp_path / "prefix.kv").tensors():
        assert rows.shape[2] == 8, name
        assert rows[0].any(), name
        assert not rows[1, :, 3:].any(), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[DecodeSession, Path]:
    """A session of int8 caches with 11 tokens, and its file."""
    session = open_tiny(tmp_path, "int8")
    session.prompt([random_ids(11)])
    session.cache.save(tmp_path / "prefix.kv")
    return session, tmp_path / "prefix.kv"


def refused(session: DecodeSession, file: Path, reason: str) -> None:
    """A load fails for the reason and changes nothing."""
    before, lengths = state(session), session.cache.lengths.tolist()
    with pytest.raises(CacheFileError, match=reason):
        session.cache.load(file)
    assert (state(session), session.cache.lengths.tolist()) == (before, lengths)


def test_truncated_files(saved: tuple[DecodeSession, Path]) -> None:
    """A file that ends early, wherever it ends."""
    session, file = saved
    data = file.read_bytes()
    for size in (1, 8, 15, 16, 40, len(data) // 2, len(data) - 33, len(data) - 1):
        file.write_bytes(data[:size])
        refused(session, file, "truncated")


def test_damaged_and_foreign_files(saved: tuple[DecodeSession, Path]) -> None:
    """Any flipped byte, bytes behind the end, another version, no cache at all."""
    session, file = saved
    data = bytearray(file.read_bytes())
    for position in (20, len(data) // 2, len(data) - 40, len(data) - 1):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        refused(session, file, "damaged|truncated|more than its header")
    file.write_bytes(bytes(data) + b"x")
    refused(session, file, "1 bytes more")
    file.write_bytes(data[:8] + b"\x02" + data[9:])
    refused(session, file, "version 2 of the format; this reader knows 1")
    for foreign in (b"", b"PK\x03\x04 an archive", b"\0" * 200):
        file.write_bytes(foreign)
        refused(session, file, "not a saved KV cache")
    file.write_bytes(data)
    assert session.cache.load(file) is None


def test_files_of_other_models(saved: tuple[DecodeSession, Path], tmp_path: Path) -> None:
    """Another cache kind, other weights, a cache too small, another batch."""
    session, file = saved
    refused(open_tiny(tmp_path, "fp8"), file, "another model or cache kind: fingerprint, layers, tensors differ")
    retrained = write_tiny(tmp_path, "int8", positions=100)
    refused(DecodeSession(retrained, capacity=48, threads=1), file, "cache kind: fingerprint differ")
    refused(open_tiny(tmp_path, "int8", capacity=10), file, "11 tokens; this cache has room for 10")
    both = open_tiny(tmp_path, "int8", batch=2)
    both.cache.save(tmp_path / "two.kv")
    refused(session, tmp_path / "two.kv", "2 batch entries; this cache has 1")


def test_an_unfinished_file_does_not_appear(saved: tuple[DecodeSession, Path], tmp_path: Path) -> None:
    """A writer that fails leaves neither its own file nor a part of it, and the old one as it was."""
    _, file = saved
    before = file.read_bytes()

    def fail() -> np.ndarray:  # type: ignore[type-arg]
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        kv_cache_file.write(file, {}, [("x", (1,), fail)])
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


def test_device_memory() -> None:
    """The four operations, on bytes of every value."""
    memory = DeviceMemory()
    shape = (2, 3, 5, 4)
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    first, second = memory.zeros(shape), memory.zeros(shape)
    address = second.data_ptr()
    assert not first.numpy().any()
    memory.write_rows(first, array)
    memory.copy(first, second)
    np.testing.assert_array_equal(memory.read_rows(second, 2), array[:, :, :2])
    memory.write_rows(second, array[:, :, 3:])
    np.testing.assert_array_equal(second.numpy()[:, :, :2], array[:, :, 3:])
    assert not second.numpy()[:, :, 2:].any()
    np.testing.assert_array_equal(first.numpy(), array)
    assert second.data_ptr() == address


def test_devices_that_are_not_there() -> None:
    """A wrong name, and CUDA in a wheel without it."""
    with pytest.raises(DeviceError, match="'tpu': must be one of cpu, cuda"):
        DeviceMemory("tpu")
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(DeviceError, match="has no CUDAExecutionProvider"):
        session_provider("cuda")


def test_models_without_such_caches(tmp_path: Path) -> None:
    """A model whose cache another operator reads is refused by the input's name."""
    import onnx

    model = onnx.load(write_tiny(tmp_path, "float"))
    extra = onnx.helper.make_tensor_value_info("past_key_values.9.key", TensorProto.FLOAT, ["B", 1, "P", 16])
    model.graph.input.append(extra)
    with pytest.raises(CacheModelError, match=r"past_key_values\.9\.key"):
        QuantizedKvCache(read_decoder(model), 1, 8)
    del model.graph.node[:]
    del model.graph.input[-1]
    with pytest.raises((CacheError, CacheModelError)):
        QuantizedKvCache(read_decoder(model), 1, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_gpu(kind: str, cuda: object, tmp_path: Path) -> None:
    """Save, load, clone and rewind of a cache in device memory, with captured steps."""
    session, other = (open_tiny(tmp_path, kind, half=True, device="cuda") for _ in range(2))
    ids = random_ids(11)
    session.prompt([ids])
    other.step([5])
    session.cache.save(tmp_path / "prefix.kv", [ids])
    assert other.cache.load(tmp_path / "prefix.kv") == [ids]
    assert state(other) == state(session)
    branch = session.cache.clone()
    assert {t.past: branch.rows(t.past).tobytes() for t in branch.tensors} == state(session)
    session.burst([random_ids(5, 2)])
    session.cache.rewind(5)
    for token in random_ids(6, 1):
        np.testing.assert_array_equal(other.step([token]), session.step([token]))
    assert state(other) == state(session)
    assert TINY.kv_heads == 1
