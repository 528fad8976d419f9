# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""genai_config.json beside a model: what a conversion changes in it, in the fields that onnxruntime-genai has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .kv_cache_convert import Conversion
from .kv_cache_layers import PER_TOKEN, CacheModelError, Problem

CONFIG = "genai_config.json"


def read_config(folder: Path) -> dict[str, Any] | None:
    """The configuration in a model's folder; None where there is none. Raises CacheModelError where it is not JSON."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as exc:
        raise CacheModelError([Problem(str(path), f"not JSON: {exc}")]) from exc
    return config if isinstance(config, dict) else None


def config_head_size(config: dict[str, Any] | None) -> int:
    """model.decoder.head_size; 0 where it is not given."""
    value = _decoder(config).get("head_size", 0)
    return value if isinstance(value, int) else 0


def _decoder(config: dict[str, Any] | None) -> dict[str, Any]:
    model = (config or {}).get("model", {})
    decoder = model.get("decoder", {}) if isinstance(model, dict) else {}
    return decoder if isinstance(decoder, dict) else {}


def describes(config: dict[str, Any] | None, model: Path) -> bool:
    """Whether the configuration is that of this model file."""
    return _decoder(config).get("filename") == model.name


def write_config(config: dict[str, Any], source: Path, target: Path) -> tuple[Path, str]:
    """Write the configuration with model.decoder.filename naming `target`; returns its path and what to know about it.

    genai reads one name only. In the input's own folder that name is the input's, so the file is there
    <stem>.genai_config.json. Raises CacheModelError where it would replace a file.
    """
    same = source.parent.resolve() == target.parent.resolve()
    path = target.parent / (f"{target.stem}.{CONFIG}" if same else CONFIG)
    if path.exists():
        raise CacheModelError([Problem(str(path), "is there already and would be replaced; write to an empty folder")])
    changed = json.loads(json.dumps(config))
    _decoder(changed)["filename"] = target.name
    path.write_text(json.dumps(changed, indent=4) + "\n", encoding="utf-8")
    note = f"rename it to {CONFIG} to use it here" if same else "copy the tokenizer's files beside it"
    return path, note


def limits(conversion: Conversion) -> str:
    """Why onnxruntime-genai cannot run the converted model; empty if nothing is known to stand against it."""
    layers = conversion.after.layers
    if any(side.granularity == PER_TOKEN for layer in layers for side in layer.sides):
        return "it has no field that names scale caches, so it cannot feed PER_TOKEN scales"
    if len({layer.element_type for layer in layers}) > 1:
        return "it gives all caches the type of the first layer, so it cannot keep layers in 16 bit"
    return ""
