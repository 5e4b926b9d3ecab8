"""NDIF's HTTP protocol, as nnsight 0.8 clients speak it: jobs in, updates and results out."""
