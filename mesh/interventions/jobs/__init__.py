"""Jobs: what an nnsight client sends, from the request to its result.

`types` is what the two halves share: `queue` keeps jobs and decides which is next, `runner` runs
one in the jail over the hops that hold the model.
"""
