"""A session of two independent GroupQueryAttention nodes."""

from __future__ import annotations

from onnx import helper

from python_tests.op.checks import check_cache, check_output
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import (
    INPUTS,
    OUTPUTS,
    input_buffers,
    input_types,
    make_session,
    node_attributes,
    output_buffers,
    output_types,
    read_cache_buffers,
    run,
    slots,
)
from python_tests.op.providers import Provider
from python_tests.reference.step import run_step


def two_nodes(cases: tuple[Case, Case]) -> bytes:
    """The model; the names of the second node's tensors end in _1."""
    nodes, ins, outs = [], [], []
    for i, case in enumerate(cases):
        tail = f"_{i}" if i else ""
        types, results = input_types(case), output_types(case)
        sources, targets = ([n and n + tail for n in slots(*s)] for s in ((INPUTS, types), (OUTPUTS, results)))
        attributes = node_attributes(case)
        nodes.append(helper.make_node(
            "GroupQueryAttention", sources, targets, f"gqa{tail}", domain="com.microsoft", **attributes
        ))  # fmt: skip
        ins += [helper.make_tensor_value_info(n + tail, kind, None) for n, (kind, _) in types.items()]
        outs += [helper.make_tensor_value_info(n + tail, kind, None) for n, kind in results.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "two", ins, outs), opset_imports=opsets, ir_version=9)
    return bytes(model.SerializeToString())


def verify_two(first: Case, second: Case, provider: Provider, calls: int = 3) -> None:
    """Run both in one session, several times, and compare each with the reference."""
    session = make_session(two_nodes((first, second)), provider)
    for _ in range(calls):
        sides = [(c, make_inputs(c), make_past(c)) for c in (first, second)]
        ins = [input_buffers(c, inputs, past, provider) for c, inputs, past in sides]
        outs = [output_buffers(side[0], i, None, provider) for side, i in zip(sides, ins, strict=True)]
        both = [a | {f"{name}_1": buffer for name, buffer in b.items()} for a, b in (ins, outs)]
        run(session, both[0], both[1])
        for (case, inputs, past), i, o in zip(sides, ins, outs, strict=True):
            expected = run_step(case.operator, inputs, past)
            check_cache(case, read_cache_buffers(i, o), expected, exact_ties=provider.exact_ties)
            check_output(o["output"].read().reshape(expected.output.shape), expected)
