"""Adapters that run inside an engine and bring it what this library has. Nothing below knows an engine."""
