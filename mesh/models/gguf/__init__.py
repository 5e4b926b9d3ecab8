"""Checkpoints that are GGUF files, the format of llama.cpp."""
