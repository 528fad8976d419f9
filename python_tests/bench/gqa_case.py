"""Shapes, formats and sizes of the operator's benchmark. NumPy is not needed: workers of any wheel import it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

# ONNX element types and bytes of an element.
FLOATS = {"fp32": (1, 4), "fp16": (10, 2), "bf16": (16, 2)}
# ONNX element type of the cache, elements in a byte, and the largest code.
QUANTIZED = {"int8": (3, 1, 127.0), "fp8": (17, 1, 448.0), "int4": (2, 2, 7.0)}
INT32 = 6
MODES = ("PER_TOKEN", "PER_TENSOR", "PER_CHANNEL")
# Outputs that are the same memory as an input.
PRESENT = {
    "past_key": "present_key", "past_value": "present_value", "k_scale": "present_k_scale",
    "v_scale": "present_v_scale",
}  # fmt: skip


class Heads(NamedTuple):
    """Attention of a model: query heads, KV heads, head size, local window (-1: none), head sinks."""

    heads: int
    kv_heads: int
    head_size: int
    window: int = -1
    sinks: bool = False


PRESETS = {
    "llama3-8b": Heads(32, 8, 128),
    "llama3-70b": Heads(64, 8, 128),
    "llama3.2-1b": Heads(32, 8, 64),
    "llama2-7b": Heads(32, 32, 128),
    "qwen2.5-7b": Heads(28, 4, 128),
    "gpt-oss": Heads(64, 8, 64, sinks=True),
    "gpt-oss-plain": Heads(64, 8, 64),
    "gemma-8-1": Heads(8, 1, 256),
    "gemma-16-8": Heads(16, 8, 256),
    "mistral": Heads(32, 8, 128, window=4096),
}


class Tensor(NamedTuple):
    """ONNX element type and shape."""

    element: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes; int4 is counted as the bytes it is stored in."""
        sizes = {1: 4, 2: 1, 3: 1, INT32: 4, 10: 2, 16: 2, 17: 1}
        return prod(self.shape) * sizes[self.element]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. tokens: of every batch entry after it; seq of them are new; capacity 0: as many rows as tokens.

    cache: fp32, fp16 or bf16 (then the activations' own) or int8, fp8, int4 with modes. prompt: attention is over the
    new tokens, which are all there are. packed: query, key and value are one tensor.
    """

    preset: str = "llama3-8b"
    cache: str = "fp16"
    k_mode: str = ""
    v_mode: str = ""
    scale_type: str = ""
    activation: str = "fp16"
    batch: int = 1
    tokens: int = 1024
    seq: int = 1
    capacity: int = 0
    prompt: bool = False
    packed: bool = True
    window: int | None = None

    @property
    def model(self) -> Heads:
        """Heads of the preset."""
        heads = PRESETS[self.preset]
        return heads if self.window is None else heads._replace(window=self.window)

    @property
    def quantized(self) -> bool:
        """Whether the cache is."""
        return self.cache in QUANTIZED

    @property
    def rows(self) -> int:
        """Rows of a (batch entry, head) in the buffers."""
        return self.capacity or self.tokens

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.model.heads // self.model.kv_heads

    @property
    def attended(self) -> int:
        """Tokens of an entry that some new token sees."""
        return self.tokens if self.model.window < 0 else min(self.tokens, self.model.window + self.seq)

    @property
    def total(self) -> int:
        """The host's total_sequence_length: the buffers' rows, so that no step is taken for a prompt."""
        return self.seq if self.prompt else self.rows

    def activations(self) -> dict[str, Tensor]:
        """Inputs of activation type that all layers share."""
        m, element = self.model, FLOATS[self.activation][0]
        width, kv = m.heads * m.head_size, m.kv_heads * m.head_size
        lead = (self.batch, self.seq)
        if self.packed:
            found = {"query": Tensor(element, (*lead, width + 2 * kv))}
        else:
            found = {n: Tensor(element, (*lead, w)) for n, w in (("query", width), ("key", kv), ("value", kv))}
        found |= {n: Tensor(element, (self.rows, m.head_size // 2)) for n in ("cos_cache", "sin_cache")}
        return found | ({"head_sink": Tensor(element, (m.heads,))} if m.sinks else {})

    def state(self) -> dict[str, Tensor]:
        """Tensors that every layer has for itself: codes, and scales of tokens."""
        m = self.model
        element, packing = (QUANTIZED[self.cache][:2]) if self.quantized else (FLOATS[self.cache][0], 1)
        lead = (self.batch, m.kv_heads, self.rows)
        found = {n: Tensor(element, (*lead, m.head_size // packing)) for n in ("past_key", "past_value")}
        scale = FLOATS[self.scale_type or "fp32"][0]
        sides = (("k_scale", self.k_mode), ("v_scale", self.v_mode))
        return found | {n: Tensor(scale, (*lead, 1)) for n, mode in sides if mode == "PER_TOKEN"}

    def static_scales(self) -> dict[str, Tensor]:
        """Scales of tensors or channels, which layers share."""
        m = self.model
        shapes = {"PER_TENSOR": (1,), "PER_CHANNEL": (1, m.kv_heads, 1, m.head_size)}
        sides = (("k_scale", self.k_mode), ("v_scale", self.v_mode))
        return {name: Tensor(FLOATS["fp32"][0], shapes[mode]) for name, mode in sides if mode in shapes}

    def shared_inputs(self) -> dict[str, Tensor]:
        """Graph inputs of all layers."""
        lengths = {"seqlens_k": Tensor(INT32, (self.batch,)), "total_sequence_length": Tensor(INT32, (1,))}
        return self.activations() | lengths | self.static_scales()

    @property
    def output(self) -> Tensor:
        """The output of a layer."""
        width = self.model.heads * self.model.head_size
        return Tensor(FLOATS[self.activation][0], (self.batch, self.seq, width))

    @property
    def cache_bytes(self) -> int:
        """K, V and scales of one layer, as bound."""
        return sum(tensor.nbytes for tensor in (*self.state().values(), *self.static_scales().values()))

    @property
    def read_bytes(self) -> int:
        """What a call must read of them: the tokens that are attended."""
        used = sum(tensor.nbytes for tensor in self.state().values()) // self.rows * self.attended
        return used + sum(tensor.nbytes for tensor in self.static_scales().values())

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, masked ones left out."""
        m, first = self.model, self.tokens - self.seq
        limit = m.window + 1 if m.window >= 0 else self.tokens
        seen = sum(min(limit, first + s + 1) for s in range(self.seq))
        return 4 * self.batch * m.heads * m.head_size * seen

    def valid(self) -> str:
        """What is wrong with it, empty if nothing."""
        if self.quantized != bool(self.k_mode) or self.quantized != bool(self.v_mode):
            return f"cache {self.cache} with modes {self.k_mode or '-'}, {self.v_mode or '-'}"
        if not self.quantized and self.cache != self.activation:
            return f"an unquantized cache has the activations' type, {self.activation}"
        if self.seq > self.tokens or self.tokens > self.rows or (self.prompt and self.seq != self.tokens):
            return f"{self.seq} new of {self.tokens} tokens in {self.rows} rows"
        return ""


def parse_cache(text: str, activation: str) -> dict[str, str]:
    """Fields of Case from plain, int8, fp8:PER_TENSOR or int8:PER_CHANNEL/PER_TOKEN. Raises ValueError."""
    name, _, modes = text.partition(":")
    if name == "plain":
        return {"cache": activation, "k_mode": "", "v_mode": ""}
    k_mode, _, v_mode = (modes or "PER_TOKEN").partition("/")
    v_mode = v_mode or k_mode
    if name not in QUANTIZED or k_mode not in MODES or v_mode not in MODES:
        msg = f"cache {text}: expected plain, or one of {', '.join(QUANTIZED)} with :MODE of {', '.join(MODES)}"
        raise ValueError(msg)
    return {"cache": name, "k_mode": k_mode, "v_mode": v_mode}


def cache_text(case: Case) -> str:
    """What parse_cache reads."""
    if not case.quantized:
        return "plain"
    return f"{case.cache}:{case.k_mode}" + (f"/{case.v_mode}" if case.v_mode != case.k_mode else "")


def with_cache(case: Case, text: str, scale_type: str = "") -> Case:
    """The case with another cache."""
    fields = parse_cache(text, case.activation)
    tokens = "PER_TOKEN" in (fields["k_mode"], fields["v_mode"])
    return replace(case, **fields, scale_type=(scale_type or "fp32") if tokens else "")  # type: ignore[arg-type]


def layer_count(case: Case, least_bytes: int, least: int, most: int, budget: int) -> int:
    """Layers whose caches together reach least_bytes, between least and most, and stay within budget bytes."""
    wanted = max(least, -(-least_bytes // case.cache_bytes))
    return max(1, min(wanted, most, max(2, budget // case.cache_bytes)))
