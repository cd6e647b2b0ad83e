"""Ops before and after the forward of step 0."""
