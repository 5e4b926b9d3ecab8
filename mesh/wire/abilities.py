"""What a node's hello says that it understands beyond what every version does."""

from __future__ import annotations

from dataclasses import replace

from mesh.wire.messages import Hello

BLOBS = "blobs"
"""The field of a hello whose sender takes `Blob`s; every `TensorSession` for tensors sets it."""


def takes_blobs(peer: Hello) -> bool:
    """Whether who said this understands `Blob`."""
    return peer.fields.get(BLOBS) is True


COPIES = "copies_prefixes"
"""The field of a hello whose sender understands `CopyPrefix`."""


def says_copies(host: Hello) -> Hello:
    """The hello of a host that understands `CopyPrefix`."""
    return replace(host, fields={**host.fields, COPIES: True})


def copies_prefixes(host: Hello) -> bool:
    """Whether who said this understands `CopyPrefix`."""
    return host.fields.get(COPIES) is True
