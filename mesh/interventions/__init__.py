"""nnsight traces over a model whose layers are on other machines: what runs inside the job.

`skeleton` is the model without its layers, `spans` runs the layers where they are, `hooks` connects
nnsight's interleaver with theirs. Everything is reached through a `channel`, the one way out of the
process that user code runs in.
"""
