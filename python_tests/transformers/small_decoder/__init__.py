"""A small byte-level decoder: text, training, weights, export to ONNX, and what quantized caches do to it."""
