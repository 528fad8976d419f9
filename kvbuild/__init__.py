"""Builds a wheel of patched ONNX Runtime: fetch, patch, configure, compile, pack, test."""
