"""Reading checkpoints as they are published: tensors by name, config.json field by field."""
