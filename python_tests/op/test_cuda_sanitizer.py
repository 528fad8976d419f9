"""Small calls that visit every CUDA kernel: what runs under compute-sanitizer (sanitize.py), and quickly without it.

append and its rotary and packed variants, copy_past, decode with 8 and 16 rows, prefill, prompt, merge; each format,
scale mode and padded head size; lengths at which tiles and splits end, and entries that do not fit.
"""

from __future__ import annotations

from typing import Any

import pytest

from python_tests.op.checks import verify
from python_tests.op.cuda_case import cuda_case
from python_tests.op.gqa_case import Case
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype, Granularity

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
TENSOR, CHANNEL, TOKEN = list(Granularity)[1:]
# Capacity 200 has splits, 40 has none.
SPLIT: dict[str, Any] = {"capacity": 300, "total": 300, "totals": (270, 3)}
WHOLE: dict[str, Any] = {"capacity": 40, "total": 40, "totals": (17, 3)}
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 1}
STATIC: dict[str, Any] = {"k_quant": CHANNEL, "v_quant": CHANNEL}
FEATURES: dict[str, Any] = {"window": 20, "softcap": 3.0, "sink": True, "smooth": True}
SHAPES: dict[str, dict[str, Any]] = {
    "decode-8-split": SPLIT | HEADS,
    "decode-8-whole": WHOLE | HEADS,
    "decode-16-split": SPLIT | HEADS | {"seq": 4, "totals": (133, 4)},
    "decode-16-group": WHOLE | {"heads": 13, "kv_heads": 1},
    "prefill-split": SPLIT | HEADS | {"seq": 20, "totals": (150, 20)},
    "prefill-whole": WHOLE | HEADS | {"seq": 17, "totals": (40, 17)},
    "prompt": {"seq": 37, "totals": (37, 5), "capacity": 40, "rotary": "half"} | HEADS,
    "prompt-without-rotary": {"seq": 18, "totals": (18, 0), "capacity": 40} | HEADS,
    "separate": SPLIT | HEADS | {"in_place": False},
    "packed-rotary": WHOLE | HEADS | {"packed": True, "rotary": "interleaved", "rotary_dim": 32},
}
EXTRA = {
    "head-size-256": {"head_size": 256} | SPLIT | HEADS,
    "head-size-256-prefill": {"head_size": 256, "seq": 20} | WHOLE | HEADS | {"totals": (40, 20)},
    "head-size-72": {"head_size": 72} | SPLIT | HEADS,
    "head-size-72-prefill": {"head_size": 72, "seq": 20} | SPLIT | HEADS | {"totals": (150, 20)},
    "head-size-8": {"head_size": 8, "rotary": "half"} | WHOLE | HEADS,
    "head-size-200-separate": {"head_size": 200, "in_place": False} | WHOLE | HEADS,
    "static": SPLIT | HEADS | STATIC,
    "static-prefill": SPLIT | HEADS | STATIC | {"seq": 20, "totals": (150, 20)},
    "mixed-tensor": WHOLE | HEADS | {"k_quant": TENSOR, "scale_type": "float32"},
    "half-scales": SPLIT | HEADS | {"scale_type": "float16", "in_place": False},
    "features": SPLIT | HEADS | FEATURES,
    "features-prefill": SPLIT | HEADS | FEATURES | {"seq": 20, "totals": (150, 20)},
    "features-prompt": {"seq": 37, "totals": (37, 5), "capacity": 40} | HEADS | FEATURES,
    "bfloat16": SPLIT | HEADS | {"activation": "bfloat16", "rotary": "half"},
    "bfloat16-prompt": {"activation": "bfloat16", "seq": 20, "totals": (20, 5), "capacity": 40, "rotary": "half"}
    | HEADS,
    "invalid": WHOLE | HEADS | {"seq": 2, "totals": (0, 1, 41, 2, 40), "in_place": False},
    "full": WHOLE | HEADS | {"totals": (40, 1)},
}  # fmt: skip


def case_of(name: str, dtype: CacheDtype, **changes: object) -> Case:
    """A case with head size 64 unless it says otherwise."""
    return cuda_case(f"sanitizer-{name}-{dtype}", dtype=dtype, **({"head_size": 64} | changes))


CASES = [case_of(name, dtype, **changes) for name, changes in SHAPES.items() for dtype in CacheDtype]
CASES += [case_of(name, list(CacheDtype)[i % 3], **changes) for i, (name, changes) in enumerate(EXTRA.items())]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_call(case: Case, cuda: Provider) -> None:
    """Right, and by the tool's word clean."""
    verify(case, cuda)
