"""Attention, cache writes and rotary embedding as ops."""
