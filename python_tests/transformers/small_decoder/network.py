"""The small decoder in NumPy: weights, forward pass, and a backward pass written by hand.

Layer norm without bias before attention and before the MLP, rotary on Q and K (halves, not interleaved), grouped query
attention, squared ReLU, embedding shared with the logits. Letters: B batch, T tokens, N query heads, M KV heads, D head
size. All arrays are float32 unless the weights are of another type: the forward pass follows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Weights: TypeAlias = dict[str, Array]
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder. The committed weights have the defaults."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    hidden: int = 512
    rotary_base: float = 10000.0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def initial_weights(shape: Shape, seed: int = 0) -> Weights:
    """Random weights, by name; matrices are (inputs, outputs)."""
    rng = np.random.default_rng(seed)
    query, pair = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    weights: Weights = {"embedding": rng.standard_normal((shape.vocabulary, shape.width)) * 0.05}
    for i in range(shape.layers):
        sizes = {"q": (shape.width, query), "k": (shape.width, pair), "v": (shape.width, pair)}
        sizes |= {"o": (query, shape.width), "up": (shape.width, shape.hidden), "down": (shape.hidden, shape.width)}
        for name, size in sizes.items():
            closing = 0.0 if name in ("o", "down") else 1.0
            weights[f"{i}.{name}"] = rng.standard_normal(size) * closing / np.sqrt(size[0])
        weights |= {f"{i}.attention_norm": np.ones(shape.width), f"{i}.mlp_norm": np.ones(shape.width)}
    weights["final_norm"] = np.ones(shape.width)
    return {name: w.astype(np.float32) for name, w in weights.items()}


def rotary_tables(shape: Shape, positions: int) -> tuple[Array, Array]:
    """(cos, sin), each (positions, D / 2) float32."""
    half = shape.head_size // 2
    frequency = shape.rotary_base ** (-np.arange(half) / half)
    angle = np.arange(positions)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of (..., T, D) by tables (T, D / 2). With -sin it is its own inverse, and its own gradient."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _norm(x: Array, weight: Array) -> tuple[Array, Array, Array]:
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(NORM_EPSILON))
    unit = centred * inverse
    return unit * weight, unit, inverse


def _norm_gradient(dy: Array, weight: Array, unit: Array, inverse: Array) -> tuple[Array, Array]:
    d = dy * weight
    dx = inverse * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True))
    return dx, (dy * unit).sum((0, 1))


def _heads(x: Array, count: int, group: int) -> Array:
    """(B, T, count * group * D) -> (B, count, group * T, D)."""
    b, t, width = x.shape
    split = x.reshape(b, t, count, group, width // (count * group)).transpose(0, 2, 3, 1, 4)
    return split.reshape(b, count, group * t, -1)


def _merge(x: Array, group: int) -> Array:
    """Inverse of _heads."""
    b, count, rows, d = x.shape
    return x.reshape(b, count, group, rows // group, d).transpose(0, 3, 1, 2, 4).reshape(b, rows // group, -1)


def _matmul_gradient(x: Array, dy: Array) -> Array:
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def forward(weights: Weights, shape: Shape, ids: Array) -> tuple[Array, list[dict[str, Array]]]:
    """Tokens (B, T) -> logits (B, T, vocabulary) and, per layer, what the backward pass needs."""
    tokens = ids.shape[1]
    dtype = weights["embedding"].dtype
    cos, sin = (table.astype(dtype) for table in rotary_tables(shape, tokens))
    group_cos, group_sin = np.tile(cos, (shape.group, 1)), np.tile(sin, (shape.group, 1))
    hidden = np.triu(np.ones((tokens, tokens), bool), 1)
    mask = np.tile(np.where(hidden, -np.inf, 0).astype(dtype), (shape.group, 1))
    scale = dtype.type(shape.head_size**-0.5)
    x, saved = weights["embedding"][ids], []
    for i in range(shape.layers):
        w = {name.split(".")[1]: value for name, value in weights.items() if name.startswith(f"{i}.")}
        s: dict[str, Array] = {}
        s["a"], s["a_unit"], s["a_inverse"] = _norm(x, w["attention_norm"])
        s["q"] = rotate(_heads(s["a"] @ w["q"], shape.kv_heads, shape.group), group_cos, group_sin)
        s["k"] = rotate(_heads(s["a"] @ w["k"], shape.kv_heads, 1), cos, sin)
        s["v"] = _heads(s["a"] @ w["v"], shape.kv_heads, 1)
        scores = s["q"] @ s["k"].swapaxes(-1, -2) * scale + mask
        p = np.exp(scores - scores.max(-1, keepdims=True))
        s["p"] = p / p.sum(-1, keepdims=True)
        s["attended"] = _merge(s["p"] @ s["v"], shape.group)
        x = x + s["attended"] @ w["o"]
        s["m"], s["m_unit"], s["m_inverse"] = _norm(x, w["mlp_norm"])
        s["relu"] = np.maximum(s["m"] @ w["up"], 0)
        x = x + (s["relu"] * s["relu"]) @ w["down"]
        saved.append(s)
    last: dict[str, Array] = {}
    last["f"], last["f_unit"], last["f_inverse"] = _norm(x, weights["final_norm"])
    return last["f"] @ weights["embedding"].T, [*saved, last]


def loss_and_gradient(weights: Weights, shape: Shape, ids: Array, targets: Array) -> tuple[float, Weights]:
    """Mean cross entropy in nats of targets (B, T) after ids (B, T), and its gradient by weight."""
    logits, saved = forward(weights, shape, ids)
    top = logits.max(-1, keepdims=True)
    exponent = np.exp(logits - top)
    total = exponent.sum(-1, keepdims=True)
    picked = np.take_along_axis(logits, targets[..., None], -1)
    loss = float((np.log(total) + top - picked).mean())
    d = exponent / total
    np.put_along_axis(d, targets[..., None], np.take_along_axis(d, targets[..., None], -1) - 1, -1)
    return loss, _backward(weights, shape, ids, saved, d / np.float32(targets.size))


def _backward(weights: Weights, shape: Shape, ids: Array, saved: list[dict[str, Array]], d_logits: Array) -> Weights:
    last, gradient = saved[-1], {}
    gradient["embedding"] = _matmul_gradient(d_logits, last["f"])
    dx, gradient["final_norm"] = _norm_gradient(
        d_logits @ weights["embedding"], weights["final_norm"], last["f_unit"], last["f_inverse"]
    )
    cos, sin = rotary_tables(shape, ids.shape[1])
    for i in reversed(range(shape.layers)):
        w = {name.split(".")[1]: value for name, value in weights.items() if name.startswith(f"{i}.")}
        dx, layer = _layer_backward(w, shape, saved[i], dx, cos, -sin)
        gradient |= {f"{i}.{name}": value for name, value in layer.items()}
    rows = np.zeros_like(weights["embedding"])
    np.add.at(rows, ids.reshape(-1), dx.reshape(-1, dx.shape[-1]))
    gradient["embedding"] += rows
    return gradient


def _layer_backward(
    w: Weights, shape: Shape, s: dict[str, Array], dx: Array, cos: Array, negative_sin: Array
) -> tuple[Array, Weights]:
    g: Weights = {"down": _matmul_gradient(s["relu"] * s["relu"], dx)}
    d_up = 2 * s["relu"] * (dx @ w["down"].T)
    g["up"] = _matmul_gradient(s["m"], d_up)
    d_mlp, g["mlp_norm"] = _norm_gradient(d_up @ w["up"].T, w["mlp_norm"], s["m_unit"], s["m_inverse"])
    dx = dx + d_mlp
    g["o"] = _matmul_gradient(s["attended"], dx)
    d_out = _heads(dx @ w["o"].T, shape.kv_heads, shape.group)
    dv = s["p"].swapaxes(-1, -2) @ d_out
    dp = d_out @ s["v"].swapaxes(-1, -2)
    ds = s["p"] * (dp - (dp * s["p"]).sum(-1, keepdims=True)) * np.float32(shape.head_size**-0.5)
    group_tables = np.tile(cos, (shape.group, 1)), np.tile(negative_sin, (shape.group, 1))
    dq = _merge(rotate(ds @ s["k"], *group_tables), shape.group)
    dk = _merge(rotate(ds.swapaxes(-1, -2) @ s["q"], cos, negative_sin), 1)
    dv = _merge(dv, 1)
    g |= {name: _matmul_gradient(s["a"], d) for name, d in (("q", dq), ("k", dk), ("v", dv))}
    d_normed = dq @ w["q"].T + dk @ w["k"].T + dv @ w["v"].T
    d_attention, g["attention_norm"] = _norm_gradient(d_normed, w["attention_norm"], s["a_unit"], s["a_inverse"])
    return dx + d_attention, g
