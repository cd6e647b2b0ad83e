"""Drafts as they are published: EAGLE, EAGLE-3, multi-token prediction, and small causal language models."""

from spec_decode.models.published.load import aux_hidden_state_layers, load_draft
from spec_decode.models.published.store import TensorStore

__all__ = ["TensorStore", "aux_hidden_state_layers", "load_draft"]
