"""Drafts as they are published: EAGLE, EAGLE-3, multi-token prediction, and small causal language models."""

from spec_decode.models.published.load import feature_layers, load_draft
from spec_decode.models.published.store import TensorStore

__all__ = ["TensorStore", "feature_layers", "load_draft"]
