"""Trains the small decoder on the CPU: `OMP_NUM_THREADS=1 python -m python_tests.transformers.small_decoder.train`.

NumPy alone. Matrices of the layers move by orthogonalized momentum (a few Newton-Schulz steps on the momentum, so that
all of its directions count alike), embedding and norms by Adam. The seed is fixed; another BLAS, or another number of
its threads, rounds differently and gives other weights of the same quality.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.network import (
    Array,
    Shape,
    Weights,
    forward,
    initial_weights,
    loss_and_gradient,
)

WEIGHTS = Path(__file__).with_name("weights.npz")
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
# Share of the steps with few long sequences, at the end: the decoder is to work beyond short contexts.
LONG_SHARE, SHORT, LONG = 0.08, (8, 256), (2, 1024)


def orthogonalized(momentum: Array, steps: int = 5) -> Array:
    """A matrix with the momentum's singular vectors and singular values near 1."""
    x = momentum / (np.linalg.norm(momentum) + 1e-7)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result = x.T if tall else x
    return np.asarray(result * np.sqrt(max(1.0, momentum.shape[0] / momentum.shape[1])), np.float32)


class Optimizer:
    """State of both update rules."""

    def __init__(self, weights: Weights) -> None:
        self.first = {name: np.zeros_like(w) for name, w in weights.items()}
        self.second = {name: np.zeros_like(w) for name, w in weights.items()}
        self.steps = 0

    def save(self, path: Path, weights: Weights) -> None:
        """Everything that the next step depends on, but for the batches, which the step's number chooses."""
        groups = {"weights": weights, "first": self.first, "second": self.second}
        arrays = {f"{group}/{name}": w for group, members in groups.items() for name, w in members.items()}
        part = path.with_suffix(".part.npz")
        np.savez(part, steps=np.array(self.steps), **arrays)  # type: ignore[arg-type]
        part.replace(path)

    def load(self, path: Path, weights: Weights) -> None:
        """What save() wrote, into `weights` and this state."""
        with np.load(path) as stored:
            self.steps = int(stored["steps"])
            for group, members in {"weights": weights, "first": self.first, "second": self.second}.items():
                for name in members:
                    members[name][:] = stored[f"{group}/{name}"]

    def update(self, weights: Weights, gradient: Weights, factor: float) -> None:
        """One step in place; factor: the schedule's."""
        self.steps += 1
        for name, g in gradient.items():
            m, v = self.first[name], self.second[name]
            if name[0].isdigit() and g.ndim == 2:
                m += 0.05 * (g - m)
                weights[name] -= np.float32(factor * MATRIX_RATE) * orthogonalized(0.05 * g + 0.95 * m)
                continue
            m += 0.1 * (g - m)
            v += 0.05 * (g * g - v)
            step = m / (1 - 0.9**self.steps) / (np.sqrt(v / (1 - 0.95**self.steps)) + 1e-8)
            weights[name] -= np.float32(factor * OTHER_RATE) * step


def batch(ids: Array, rng: np.random.Generator, size: tuple[int, int]) -> tuple[Array, Array]:
    """Tokens and the tokens after them, each of the given size."""
    starts = rng.integers(0, len(ids) - size[1] - 1, size[0])
    rows = np.stack([ids[s : s + size[1] + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def held_out_loss(weights: Weights, shape: Shape, length: int = 512) -> float:
    """Nats a byte over the held-out text, in pieces of `length` bytes."""
    ids = text.tokens(text.held_out_text())
    losses = []
    for start in range(0, len(ids) - length - 1, length):
        piece = ids[None, start : start + length + 1]
        logits = forward(weights, shape, piece[:, :-1])[0].astype(np.float64)
        picked = np.take_along_axis(logits, piece[:, 1:, None], -1)[..., 0]
        losses.append(np.mean(np.log(np.exp(logits).sum(-1)) - picked))
    return float(np.mean(losses))


def schedule(step: int, steps: int) -> float:
    """Learning rate factor: a short rise, then down to 0 over the last half."""
    return min((step + 1) / 20, 1.0, 2.0 * (steps - step) / steps)


def train(shape: Shape, steps: int, seed: int = 0, checkpoint: Path | None = None) -> Weights:
    """Trained weights, float32. Prints the loss every 20 steps; goes on from a checkpoint where there is one."""
    weights = initial_weights(shape, seed)
    optimizer, ids = Optimizer(weights), text.tokens(text.training_text())
    if checkpoint is not None and checkpoint.exists():
        optimizer.load(checkpoint, weights)
    recent: list[float] = []
    started = time.process_time()
    for step in range(optimizer.steps, steps):
        size = LONG if step >= steps * (1 - LONG_SHARE) else SHORT
        rng = np.random.default_rng([seed, step])
        loss, gradient = loss_and_gradient(weights, shape, *batch(ids, rng, size))
        optimizer.update(weights, gradient, schedule(step, steps))
        recent.append(loss)
        if (step + 1) % 20 == 0:
            seconds = time.process_time() - started
            print(f"step {step + 1:5d}  loss {np.mean(recent):.4f} nats a byte  {seconds:.0f} CPU seconds", flush=True)
            recent.clear()
            if checkpoint is not None:
                optimizer.save(checkpoint, weights)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, written every 20 steps")
    arguments = parser.parse_args()
    shape = Shape()
    # What is stored is what is measured: float16, which halves the file.
    stored = {
        name: w.astype(np.float16) for name, w in train(shape, arguments.steps, checkpoint=arguments.checkpoint).items()
    }
    loss = held_out_loss({name: w.astype(np.float32) for name, w in stored.items()}, shape)
    np.savez_compressed(arguments.output, **stored)  # type: ignore[arg-type]
    size = arguments.output.stat().st_size
    print(f"held out: {loss:.4f} nats a byte, perplexity {np.exp(loss):.3f}; text {text.digest()}; {size:,} bytes")


if __name__ == "__main__":
    main()
