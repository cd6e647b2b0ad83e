"""Tokens out of logits: noise, temperature, restrictions, draws."""
