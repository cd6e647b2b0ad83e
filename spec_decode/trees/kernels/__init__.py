"""Ops over trees of draft tokens and their kernels."""
