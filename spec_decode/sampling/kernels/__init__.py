"""Sampling ops and their kernels."""
