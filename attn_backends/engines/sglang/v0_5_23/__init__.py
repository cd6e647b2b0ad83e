"""Adapters for SGLang 0.5.23. Importing any of them with another SGLang raises `UnsupportedSglang`."""

from attn_backends.engines.sglang.version import require_supported

require_supported()
