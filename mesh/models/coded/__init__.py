"""Weights that safetensors hold as codes of few bits, with their scales in tensors of their own."""
