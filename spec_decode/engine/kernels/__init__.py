"""Ops before and after the target's forward."""
