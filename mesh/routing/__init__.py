"""Pure decisions about who computes which layers. No I/O, no clock, no randomness, no torch."""
