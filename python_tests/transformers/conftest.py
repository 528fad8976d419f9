"""Makes the KV cache tools importable before test modules ask for them."""

from __future__ import annotations

from python_tests.transformers import installed as installed
