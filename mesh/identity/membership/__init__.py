"""Membership: the roster as a pure function of the set of a hearth's decisions.

Membership is a state machine on the causal past. Each decision names the decisions that its author
had seen, so what it was entitled to, and how many votes it took, is read off its own past: the same
on every node, for ever, in whatever order decisions arrive. The rules:

- The founder is an anchor. Anchors let nodes in, change levels, put nodes out.
- Becoming an anchor takes two anchors' votes once there are two; an anchor is put out or demoted by
  two once there are three (`Founded.two_signatures`). Whoever has voted for an anchor counts it as
  one ever after, also before the vote was carried: nobody gains by not having seen the outcome.
- What a node signed that those who put it out had not seen is void, whatever it claims to have
  seen. A revoked key never comes back.
- Decisions that void each other, such as two anchors revoking each other, cannot be ranked.
  Everybody they would put out is frozen, and what only a frozen anchor decided is void. Frozen
  anchors still count when votes are: one that is left does not decide alone.
- An anchor that signed two histories (its key was copied, or its log restored from a backup) is
  forked: it decides nothing until it is readmitted or put out. What of its histories others had
  acknowledged, by deciding after it, stays.
- The recovery code makes its user the only anchor. Members stay members; whatever the anchors
  before decided without having seen that is void.

`acts` reads decisions, `rulings` finds what has the votes it needs in its own past, `resolve` finds
which of those hold together, `reading` makes the roster, `rules` is the door.
"""

from mesh.identity.membership.rules import HearthRules, verify

__all__ = ["HearthRules", "verify"]
