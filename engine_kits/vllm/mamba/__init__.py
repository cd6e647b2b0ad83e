"""The builders over BaseMambaAttentionMetadataBuilder, which split rows by their order."""
