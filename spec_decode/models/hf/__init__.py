"""Targets that are models of the library `transformers`, and tokenizers."""

from attn_backends.extras import install_hint


def absent(error: ImportError) -> str:
    """Return what to do if importing the library raised this."""
    return (
        f"a published target needs transformers, which cannot be imported: {error}. Run {install_hint('transformers')}."
    )
