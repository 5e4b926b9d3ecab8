"""hearthnet: a peer-to-peer mesh that runs one language model over a household's machines."""

__version__ = "0.1.0"
