"""What a hearth agreed on: signed events, per-author chains, the state they fold to, and gossip.

Knows nothing of keys, links or models: signing, verifying and the rules of membership come in from
outside (`mesh.events.rules`), messages go out as plain data (`mesh.events.messages`).
"""
