"""Read published checkpoints: tensors by name, config.json field by field."""
