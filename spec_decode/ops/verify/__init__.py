"""What of a draft is kept: by exact match, by rejection, as a block."""
