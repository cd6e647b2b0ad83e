"""Bench, soak, doctor and the metadata validator."""
