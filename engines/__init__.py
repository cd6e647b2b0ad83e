"""Adapters that run this library inside an engine. The other packages do not know any engine."""
