"""Soak: thousands of rounds of a drafter while requests join and leave, compared with eager drafting now and then."""

from spec_decode.tools.soak.memory import Memory
from spec_decode.tools.soak.result import SCHEMA, Failure, Options, SoakReport, SoakResult
from spec_decode.tools.soak.runner import command_line, soak, soak_backend

__all__ = ["SCHEMA", "Failure", "Memory", "Options", "SoakReport", "SoakResult", "command_line", "soak", "soak_backend"]
