"""Adapters for vLLM 0.33. Importing any of them on another vLLM raises `UnsupportedVllm`."""

from engines.vllm.version import require_supported

require_supported()
