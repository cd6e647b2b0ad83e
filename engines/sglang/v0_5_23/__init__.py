"""Adapters for SGLang 0.5.23. Importing any of them with another SGLang raises `UnsupportedSglang`."""

from engines.sglang.version import require_supported

require_supported()
