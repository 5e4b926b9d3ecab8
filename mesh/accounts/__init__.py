"""Accounts: the resources of a node, the ledger that counts who holds them, the limits set."""
