"""How past and present may lie to each other on the device: one buffer for all of the state, or two for all of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from python_tests.op.checks import check_cache, check_output, check_past_kept, verify
from python_tests.op.cuda_case import cuda_case
from python_tests.op.decode_loop import DecodeLoop
from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import (
    Buffers,
    build_model,
    cached_session,
    input_buffers,
    output_buffers,
    read_cache_buffers,
    run,
)
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype, Granularity
from python_tests.reference.step import Cache, run_step

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
STATE = {
    "present_key": "past_key", "present_value": "past_value", "present_k_scale": "k_scale",
    "present_v_scale": "v_scale",
}  # fmt: skip
MIXTURES = [names for count in (1, 2, 3) for names in combinations(STATE, count)]


def buffers(case: Case, provider: Provider) -> tuple[Buffers, Buffers, Buffers]:
    """Inputs, outputs that are the inputs' buffers, and outputs of their own."""
    ins = input_buffers(case, make_inputs(case), make_past(case), provider)
    return (
        ins,
        output_buffers(case, ins, None, provider),
        output_buffers(case, ins, poisoned_cache(case, case.present_capacity), provider),
    )


def past_of(ins: Buffers) -> Cache:
    """The bound past and its scales."""
    return Cache(*(ins[name].read() for name in STATE.values()))


def refused(case: Case, ins: Buffers, outs: Buffers, provider: Provider, message: str) -> None:
    """The call is an error with that message, and changes nothing."""
    held = {name: buffer.read().tobytes() for name, buffer in (ins | outs).items()}
    with pytest.raises(RuntimeError, match=message):
        run(cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2), ins, outs)
    for name, buffer in (ins | outs).items():
        assert buffer.read().tobytes() == held[name], name
        assert not buffer.stray_writes(), name


@pytest.mark.parametrize("shared", MIXTURES, ids="+".join)
def test_some_shared(shared: tuple[str, ...], cuda: Provider) -> None:
    """Every way to share a part of the state only."""
    case = cuda_case("alias-some", totals=(21, 9), total=64)
    ins, same, separate = buffers(case, cuda)
    outs = separate | {name: same[name] for name in shared}
    refused(case, ins, outs, cuda, r"(past|k_scale|v_scale).*share")


@pytest.mark.parametrize("name", list(STATE))
@pytest.mark.parametrize("offset", [-256, 256])
def test_overlap(name: str, offset: int, cuda: Provider) -> None:
    """A present buffer that begins before or behind its past's beginning, inside of it."""
    case = cuda_case("alias-overlap", totals=(21, 9), total=64)
    ins, _, outs = buffers(case, cuda)
    held = ins[STATE[name]].read().tobytes()
    outs[name].pointer = ins[STATE[name]].pointer + offset
    with pytest.raises(RuntimeError, match=f"{STATE[name]}.*overlap"):
        run(cached_session(build_model(case), cuda, "ORT_ENABLE_ALL", 2), ins, outs)
    assert ins[STATE[name]].read().tobytes() == held


@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
def test_a_refused_call_leaves_the_session_usable(graph: int, cuda: Provider) -> None:
    """Also where it would have been captured."""
    case = cuda_case("alias-then", totals=(21, 9), total=64)
    provider = cuda.having(enable_cuda_graph=graph)
    loop = DecodeLoop(case, provider)
    ins, same, separate = buffers(case, provider)
    with pytest.raises(RuntimeError, match="share"):
        run(loop.session, ins, separate | {"present_key": same["present_key"]})
    loop.checked_step(make_inputs(case))


@pytest.mark.parametrize("modes", [(g, h) for g in list(Granularity)[1:] for h in list(Granularity)[1:]],
                         ids=lambda m: f"{m[0]}-{m[1]}")  # fmt: skip
@pytest.mark.parametrize("dtype", FORMATS)
def test_separate_buffers_copy(dtype: CacheDtype, modes: tuple[Granularity, Granularity], cuda: Provider) -> None:
    """Old rows and scales arrive as bytes, past is unchanged, rows beyond the new ones are what present held."""
    case = cuda_case(
        f"alias-copy-{dtype}-{modes[0]}-{modes[1]}", dtype=dtype, k_quant=modes[0], v_quant=modes[1], in_place=False,
        totals=(40, 1, 23, 64), total=64,
    )  # fmt: skip
    verify(case, cuda)
    # An entry that does not fit is not copied either.
    _, expected = verify(replace(case, seq=3, totals=(40, 2, 65, 64)), cuda)
    assert expected.valid.tolist() == [True, False, False, True]


@pytest.mark.parametrize("scale_type", ["float32", "float16"])
@pytest.mark.parametrize("head_size", [8, 24, 72, 80, 128, 256])
@pytest.mark.parametrize("dtype", FORMATS)
def test_present_longer_than_past(dtype: CacheDtype, head_size: int, scale_type: str, cuda: Provider) -> None:
    """Rows of one head start elsewhere in present than in past: every head size, odd capacities, past 0 included."""
    base = cuda_case(
        f"alias-grow-{dtype}-{head_size}-{scale_type}", dtype=dtype, head_size=head_size, scale_type=scale_type,
        in_place=False,
    )  # fmt: skip
    for past, seq in ((5, 1), (33, 4), (0, 3), (127, 40)):
        total = past + seq
        case = replace(
            base, capacity=past, seq=seq, totals=(total, total, max(total - 2, seq)), total=total + (past == 0)
        )
        verify(case, cuda)


@pytest.mark.parametrize("dtype", FORMATS)
def test_two_buffers_by_turns(dtype: CacheDtype, cuda: Provider) -> None:
    """Present of one step is past of the next: twelve steps between two buffers, each copied and extended."""
    case = cuda_case(f"alias-turns-{dtype}", dtype=dtype, totals=(1, 1), total=64, in_place=False, rotary="half")
    session = cached_session(build_model(case), cuda, "ORT_ENABLE_ALL", 2)
    ins, _, outs = buffers(case, cuda)
    for t in range(12):
        now = replace(case, id=f"{case.id}-{t}", totals=(1 + t, 1 + t))
        inputs = make_inputs(now)
        for name in ("query", "key", "value", "seqlens_k"):
            array = getattr(inputs, name)
            ins[name].write(array)
        past, present = past_of(ins), read_cache_buffers(ins, outs)
        run(session, ins, outs)
        expected = run_step(now.operator, inputs, past, present)
        check_cache(now, read_cache_buffers(ins, outs), expected)
        check_output(outs["output"].read().reshape(expected.output.shape), expected)
        check_past_kept(past_of(ins), past)
        for target, source in STATE.items():
            ins[source], outs[target] = outs[target], ins[source]
    assert np.isfinite(outs["output"].read()).all()
