"""This node's place in its hearth: who is in, the log they share, inviting, joining, linking.

Puts identity, the event log and discovery together; knows nothing of models, shards' contents or
HTTP.
"""
