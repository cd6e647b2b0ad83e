"""Adapters that run this library inside an engine, a room for each. Nothing else here knows any engine."""
