"""Runs a case on the device and compares everything it left with the reference."""

from __future__ import annotations

from python_tests.kernel.call import Call, Outcome
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device, Kernel
from python_tests.kernel.params import DECODE, PREFILL, PROMPT, GqaPlan
from python_tests.kernel.yardstick import check_cache, check_output, check_prompt_key, expected_of
from python_tests.op.gqa_case import make_inputs, make_past, poisoned_cache
from python_tests.reference.step import Cache, Expected, Inputs

# The part of the output bound that each verified case used; the test report ends with the largest.
USED_FRACTIONS: dict[str, float] = {}


def verify(
    case: KernelCase,
    device: Device,
    kernels: tuple[Kernel, ...] = ("gqa",),
    *,
    inputs: Inputs | None = None,
    past: Cache | None = None,
    misalign: int = 0,
    activation_misalign: int = 0,
) -> tuple[Outcome, Expected, GqaPlan]:
    """Run a case, with its own tensors or given ones. kernels: the launchers to call; output is judged after "gqa".

    The kernels run before the reference: memory that is used again cannot hold the right answer.
    """
    inputs = make_inputs(case) if inputs is None else inputs
    past = make_past(case) if past is None else past
    assert not case.in_place or case.capacity >= case.host_total, "one buffer for past and present must hold the call"
    present = None if case.in_place else poisoned_cache(case, case.present_capacity)
    places = {"misalign": misalign, "activation_misalign": activation_misalign}
    with Call(device, case, inputs, past, present, **places) as call:
        for kernel in kernels:
            call.launch(kernel)
        outcome, plan = call.outcome(), call.plan
    assert plan.path == path_of(case), f"path {device.path_name(plan)}"
    expected = expected_of(case, inputs, past, present)
    judge(case, outcome, expected, past, attended="gqa" in kernels)
    return outcome, expected, plan


def path_of(case: KernelCase) -> int:
    """The kernels that serve a case: decode for few query rows of a KV head, prefill for more, prompt without past."""
    rows = case.seq * case.heads // case.kv_heads
    decode_rows = 16 if case.head_size <= 128 else 8
    return PROMPT if case.prompt else DECODE if rows <= decode_rows else PREFILL


def judge(case: KernelCase, outcome: Outcome, expected: Expected, past: Cache, *, attended: bool = True) -> None:
    """Guards, bytes, scales, the past where it is separate, prompt_key, and the output."""
    assert not outcome.stray, f"guard bytes written, offsets by buffer: {outcome.stray}"
    check_cache(outcome.cache, expected.cache)
    if outcome.past is not None:
        check_cache(outcome.past, past, "past")
    if outcome.prompt_key is not None:
        check_prompt_key(outcome.prompt_key, expected, case)
    if attended:
        USED_FRACTIONS[case.id] = check_output(outcome.output, expected, case.half)
