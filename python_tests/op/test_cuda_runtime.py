"""Controls of what the GPU tests stand on: device memory, its guards, streams."""

from __future__ import annotations

import time

import numpy as np
import pytest
from onnx import TensorProto

from python_tests.op import cuda_runtime
from python_tests.op.cuda_runtime import CudaError, DeviceMemory, Stream
from python_tests.op.guarded import GuardedArray
from python_tests.op.providers import Provider
from python_tests.reference.bfloat16 import round_bfloat16

pytestmark = pytest.mark.gpu
MIB = 2**20


def test_memory(cuda: Provider) -> None:
    """Bytes come back as they were written, at any offset; what is not in the allocation is not touched."""
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8)
    memory = DeviceMemory(data.size, cuda.device_id, fill=7)
    assert (memory.read() == 7).all()
    memory.write(data)
    assert np.array_equal(memory.read(), data)
    memory.fill(9, MIB + 3, 5)
    memory.write(np.array([1, 2, 3], np.uint8), 11)
    data[MIB + 3 : MIB + 8], data[11:14] = 9, [1, 2, 3]
    assert np.array_equal(memory.read(), data)
    assert np.array_equal(memory.read(MIB, 10), data[MIB : MIB + 10])
    with pytest.raises(AssertionError):
        memory.write(data, 1)


def test_memory_is_given_back(cuda: Provider) -> None:
    """An allocation shows in the device's free memory while it lives; one beyond the device is an error."""
    total = cuda_runtime.memory_info(cuda.device_id)[1]
    memory = DeviceMemory(512 * MIB, cuda.device_id)
    assert cuda_runtime.memory_info(cuda.device_id)[0] <= total - 512 * MIB
    memory.free()
    with pytest.raises(CudaError, match="cudaMalloc"):
        DeviceMemory(2 * total, cuda.device_id)


@pytest.mark.parametrize("misalign", [0, 2])
def test_guards(misalign: int, cuda: Provider) -> None:
    """A byte before or behind an array on the device is seen, none inside is."""
    array = np.arange(35, dtype=np.float16).reshape(5, 7)
    buffer = GuardedArray(array, int(TensorProto.FLOAT16), cuda.device, misalign, cuda.device_id)
    assert buffer.pointer % 64 == misalign
    assert np.array_equal(buffer.read(), array)
    buffer.write(array + 1)
    assert np.array_equal(buffer.read(), array + 1)
    assert not buffer.stray_writes()
    for offset in (-1, array.nbytes):
        byte = buffer.memory.read(buffer.start + offset, 1)
        buffer.memory.write(byte ^ 1, buffer.start + offset)
        assert buffer.stray_writes() == [offset]
        buffer.memory.write(byte, buffer.start + offset)


def test_bfloat16(cuda: Provider) -> None:
    """float32 on this side, two bytes on the device; a value that the type does not have is refused."""
    values = round_bfloat16(np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32))
    buffer = GuardedArray(values, int(TensorProto.BFLOAT16), cuda.device, 0, cuda.device_id)
    assert buffer.nbytes == 48
    assert np.array_equal(buffer.read(), values)
    with pytest.raises(AssertionError, match="bfloat16 does not have"):
        buffer.write(np.full((3, 8), 1 + 2.0**-9, np.float32))


def test_streams(cuda: Provider) -> None:
    """A pause delays what is enqueued behind it, an event carries the order to another stream."""
    first, second = Stream(cuda.device_id), Stream(cuda.device_id)
    source, target = (DeviceMemory(64, cuda.device_id, fill=n) for n in (1, 2))
    begun = time.perf_counter()
    start = first.record()
    first.pause(0.03)
    first.copy(target.pointer, source.pointer, 64)
    end = first.record()
    second.wait(end)
    second.copy(source.pointer, target.pointer, 64)
    second.synchronize()
    assert time.perf_counter() - begun >= 0.03
    end.synchronize()
    assert end.seconds_since(start) >= 0.02
    assert (target.read() == 1).all()
    first.synchronize()


def test_device(cuda: Provider) -> None:
    """There is a device, and one that is not there is an error."""
    count = cuda_runtime.device_count()
    assert count >= 1
    assert cuda_runtime.compute_capability(cuda.device_id) >= 75
    with pytest.raises(CudaError, match="cudaSetDevice"):
        cuda_runtime.synchronize(count)
