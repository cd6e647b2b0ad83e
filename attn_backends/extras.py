"""How to install what an optional part of this library needs."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The command that installs an extra, for messages. It needs a checkout, because no package index has a release."""
    return f"pip install '.[{extra}]' in a checkout of attn-backends"
