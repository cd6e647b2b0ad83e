"""Verification ops and their kernels."""
