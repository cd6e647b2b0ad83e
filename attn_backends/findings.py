"""What the doctor finds: one record for each thing that it examines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingStatus(str, Enum):
    """What a finding means for drafting."""

    OK = "ok"
    ABSENT = "absent"
    """Not installed; nothing else is wrong."""
    REFUSED = "refused"
    """Installed, but it supports none of the requested specs."""
    FAILED = "failed"
    """Installed, but it does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. detail: a version or an observation, or the reason if the status is not OK."""

    topic: str
    subject: str
    status: FindingStatus
    detail: str
