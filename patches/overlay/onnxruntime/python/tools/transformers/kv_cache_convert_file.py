# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""From a decoder's file to one with a quantized cache: rewritten, its weights placed, checked, reported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from . import kv_cache_genai as genai
from .kv_cache_calibration import Calibration
from .kv_cache_convert import CacheChoice, Conversion, quantize_caches
from .kv_cache_graph import CONTRIB_DOMAIN, walk
from .kv_cache_layers import CacheModelError, DecoderModel, Problem
from .kv_cache_model import load_graph
from .kv_cache_weights import DataFile, place_data, remove


@dataclass(frozen=True)
class Written:
    """What convert_file made. data: where the weights are. config: genai's file and a note. loaded: which provider."""

    conversion: Conversion
    path: Path
    data: list[DataFile]
    config: tuple[Path, str] | None
    loaded: str


def convert_file(
    source: Path, target: Path, choice: CacheChoice, calibration: Calibration | None = None, data: str = "auto"
) -> Written:
    """Convert `source` to `target`, which must not exist. data: see kv_cache_weights.

    The result is checked by onnx.checker and loaded before it gets its name; what fails leaves no file behind. Raises
    CacheModelError with nodes and reasons, FileNotFoundError, FileExistsError.
    """
    model = load_graph(source)
    if target.exists() or target.is_symlink():
        same = "the input itself" if target.exists() and target.samefile(source) else "there already"
        msg = f"{target} is {same}; nothing is ever replaced: give another name"
        raise FileExistsError(msg)
    config = genai.read_config(source.parent)
    ours = genai.describes(config, source)
    if not choice.head_size and ours:
        choice = CacheChoice(**{**vars(choice), "head_size": genai.config_head_size(config)})
    conversion = quantize_caches(model, choice, calibration)
    target.parent.mkdir(parents=True, exist_ok=True)
    files = place_data(model, source, target, data)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    written = None
    try:
        onnx.save(model, str(partial))
        _check_onnx(model, partial)
        loaded = check_loads(source, partial, conversion)
        written = genai.write_config(config, source, target) if ours and config else None
        _give_name(partial, target)
    except BaseException:
        remove(files)
        if written:
            written[0].unlink(missing_ok=True)
        raise
    finally:
        partial.unlink(missing_ok=True)
    return Written(conversion, target, files, written, loaded)


def _give_name(partial: Path, target: Path) -> None:
    try:
        # Unlike rename, link fails where a file of that name has appeared meanwhile.
        os.link(partial, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        partial.rename(target)


def _check_onnx(model: ModelProto, path: Path) -> None:
    """onnx.checker over the model that lies at `path`. Raises CacheModelError."""
    # onnxruntime has operators of its own in ONNX's domain (SimplifiedLayerNormalization), which exporters use and the
    # checker takes for mistakes. It looks at a copy where they have a domain that it leaves alone.
    nodes = [node for node, _ in walk(model.graph) if node.domain in ("", "ai.onnx")]
    own = [(node, node.domain) for node in nodes if not onnx.defs.has(node.op_type)]
    checked = path.with_suffix(".checked") if own else path
    try:
        if own:
            for node, _ in own:
                node.domain = CONTRIB_DOMAIN
            onnx.save(model, str(checked))
        onnx.checker.check_model(str(checked))
    except onnx.checker.ValidationError as exc:
        raise CacheModelError([Problem("onnx.checker", f"refuses the result: {exc}")]) from exc
    finally:
        for node, domain in own:
            node.domain = domain
        if own:
            checked.unlink(missing_ok=True)


def check_loads(source: Path, path: Path, conversion: Conversion) -> str:
    """Make a session; returns the provider that loaded it, or why the input itself cannot be loaded here.

    Raises CacheModelError where the result is wrong.
    """
    activations = {layer.element_type for layer in conversion.before.layers}
    provider = "CPUExecutionProvider"
    if TensorProto.BFLOAT16 in activations:
        provider = "CUDAExecutionProvider"
        if provider not in ort.get_available_providers():
            return "not loaded: bfloat16 needs the CUDA provider, which this onnxruntime does not have"
    try:
        session = _load(path, provider)
    except Exception as exc:
        try:
            _load(source, provider)
        except Exception as original:
            return f"not loaded: {provider} cannot load the input either ({_first_line(original)})"
        raise CacheModelError([Problem(provider, f"loads the input but not the result: {_first_line(exc)}")]) from exc
    inputs, outputs = {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}
    lost = (set(conversion.added_inputs) - inputs) | (set(conversion.added_outputs) - outputs)
    if lost:
        raise CacheModelError(
            [Problem(name, "is not an input or output of the loaded result") for name in sorted(lost)]
        )
    return provider


def _load(path: Path, provider: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    # As the file is: folding and packing weights would read them, and a model may be larger than the memory.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=[provider])


def _first_line(exc: Exception) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)


def describe(decoder: DecoderModel) -> list[str]:
    """One line for each run of alike layers, then the sum."""
    lines, rows = [], []
    for la in decoder.layers:
        modes = "" if not la.quantized else f", K {la.key.granularity}, V {la.value.granularity}"
        heads = f"{la.kv_heads} KV heads of {la.head_size}"
        rows.append((la.index, f"{la.cache_dtype}{modes}; {heads}, {la.bytes_per_token:,} bytes a token"))
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i][1] != rows[start][1]:
            first, last = rows[start][0], rows[i - 1][0]
            lines.append(
                f"  layer {first}: {rows[start][1]}"
                if first == last
                else f"  layers {first} to {last}: {rows[start][1]}"
            )
            start = i
    return [*lines, f"  {len(rows)} layers, {decoder.bytes_per_token:,} cache bytes a token and batch entry"]


def report(written: Written) -> str:
    """What was done, for a person."""
    conversion = written.conversion
    before, after = conversion.before.bytes_per_token, conversion.after.bytes_per_token
    kept = f"; kept as they were: {', '.join(map(str, conversion.kept))}" if conversion.kept else ""
    lines = [f"{written.path}: {len(conversion.changed)} of {len(conversion.before.layers)} caches converted{kept}"]
    lines += describe(conversion.after)
    lines.append(f"  cache bytes a token: {before:,} before, {after:,} after ({before / after:.2f} times less)")
    for what, names in (("graph inputs", conversion.added_inputs), ("graph outputs", conversion.added_outputs)):
        if names:
            lines.append(f"  {len(names)} {what} added: {names[0]} ... {names[-1]}")
    if conversion.initializers:
        lines.append(f"  {len(conversion.initializers)} initializers added: static scales")
    lines += [f"  weights: {file.path}, {file.size:,} bytes, {file.how}" for file in written.data]
    if written.config:
        lines.append(f"  {written.config[0]}: model.decoder.filename; {written.config[1]}")
        if why := genai.limits(conversion):
            lines.append(f"  onnxruntime-genai cannot run this model: {why}")
    if any(la.element_type == TensorProto.FLOAT for la in conversion.before.layers):
        lines.append("  float activations: for the CPU; the CUDA provider takes float16 and bfloat16")
    checked = written.loaded if written.loaded.startswith("not ") else f"loaded by {written.loaded}"
    return "\n".join([*lines, f"  checked by onnx.checker; {checked}"])
