"""Weights between nodes: who has which tensors, and how they get to whoever needs them."""
