"""What works and what does not: one finding each, with what to do about it."""
