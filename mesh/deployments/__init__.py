"""Deployments: what the members wish their machines to hold, and what each does about it."""
