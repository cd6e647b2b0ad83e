"""An engine's metadata builder, wrapped so that the conformance kit can check it."""
