"""Products of rows with weights, in 16 and in 8 bits, and which kernel multiplies how many rows."""
