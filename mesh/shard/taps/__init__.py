"""Intervention sessions: a span that stops at declared points and shows what it has there.

`codec`, `shared_tensors` and `joints` are spoken by both ends; `tree`, `session` and `server` are
the shard's side. The job's side is `mesh.interventions`.
"""
