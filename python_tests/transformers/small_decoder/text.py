"""English text that comes with Python: the language reference as `pydoc` prints it, split by topic.

The texts differ a little between Python releases, so numbers that depend on them are recorded with `digest()`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

# Topics that no other topic repeats, in every release since 3.11: about 3 % of the text.
HELD_OUT = (
    "assert", "binary", "booleans", "exprlists", "global", "power", "slicings", "truth", "unary",
)  # fmt: skip


@lru_cache(maxsize=1)
def training_text() -> bytes:
    """All topics but the held-out ones, in the order of their names."""
    return "\n\n".join(topics[name] for name in sorted(topics) if name not in HELD_OUT).encode()


@lru_cache(maxsize=1)
def held_out_text() -> bytes:
    """What the decoder has not seen in training."""
    return "\n\n".join(topics[name] for name in HELD_OUT).encode()


def digest() -> str:
    """The first 16 hexadecimal digits of the sha256 of both texts."""
    return hashlib.sha256(training_text() + b"\0" + held_out_text()).hexdigest()[:16]


def tokens(text: bytes) -> NDArray[np.int64]:
    """A token is a byte: (length,) int64."""
    return np.frombuffer(text, np.uint8).astype(np.int64)
