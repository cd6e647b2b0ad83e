"""Kernels for the models' layers."""
