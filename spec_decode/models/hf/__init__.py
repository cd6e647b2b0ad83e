"""A target that is a model of the library `transformers`."""
