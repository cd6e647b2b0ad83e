"""What the adapters compute themselves."""
