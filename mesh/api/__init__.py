"""The HTTP API of the local daemon: OpenAI's endpoints, the mesh's own, health and metrics."""
