"""Doctor and the metadata validator."""
