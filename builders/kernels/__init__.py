"""Ops on the shared state of a batch, and how ops are defined and launched."""
