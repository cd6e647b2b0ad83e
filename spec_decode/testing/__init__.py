"""Shared by checks, tools and tests: oracles, fixtures, process isolation."""
