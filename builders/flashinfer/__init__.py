"""FlashInfer's metadata: a plan made on the host or on the device, over wrappers whose buffers stay."""
