"""Steps of few rows on a CUDA device, where starting kernels takes longer than running them.

The keys and values of all sessions lie in one `pool`; what a step of so many rows does is captured
once as a CUDA graph over fixed addresses and only replayed from then on. The layers are those of
`mesh.shard.lean`. Longer steps, and those with hooks, go by the same weights and caches without it.
"""
