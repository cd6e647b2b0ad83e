"""Targets that are models of the library `transformers`."""
