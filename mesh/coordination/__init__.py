"""Coordination: publish what a node holds, look up who holds a model, wait until it is ready.

The records, their stores and the readiness of workers, as ModelExpress has them. Knows nothing of
shards, links or HTTP: `mesh.node.coordination` tells it what the node holds.
"""
