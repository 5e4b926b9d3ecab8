"""The recovery code: 128 random bits on paper, which make a key that outranks all anchors.

The hearth's founding names the key's public half; the code itself is shown once and kept nowhere.
The alphabet is Crockford's base 32 (crockford.com/base32.html): no I, L, O or U, and what looks
like one of them is read as the digit it resembles. Twelve bits of a hash catch mistyping.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mesh.errors import BadValue

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LOOKALIKES = str.maketrans("OIL", "011")
_SECRET_BITS, _CHECK_BITS = 128, 12
_DIGITS = (_SECRET_BITS + _CHECK_BITS) // 5
_GROUP = 4


def new_code() -> str:
    """A fresh code, as it is printed: seven groups of four characters."""
    return _written(secrets.token_bytes(_SECRET_BITS // 8))


def recovery_key(code: str) -> Ed25519PrivateKey:
    """The key that a code makes. Raises BadValue for text that is no code, or mistyped."""
    secret = _read(code)
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(b"hearthnet/recovery-key/v1\0" + secret).digest()
    )


def proves(public_key: bytes, proof: bytes, statement: bytes) -> bool:
    """Whether `proof` is the recovery key's signature of the statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(proof, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def _written(secret: bytes) -> str:
    number = int.from_bytes(secret, "big") << _CHECK_BITS | _check(secret)
    digits = [_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_DIGITS))]
    return "-".join("".join(digits[at : at + _GROUP]) for at in range(0, _DIGITS, _GROUP))


def _read(code: str) -> bytes:
    digits = re.sub(r"[\s-]", "", code).upper().translate(_LOOKALIKES)
    if len(digits) != _DIGITS or not set(digits) <= set(_ALPHABET):
        raise BadValue(
            f"A recovery code has {_DIGITS} letters and digits, in groups of {_GROUP}.",
            fix="Type it as it was printed when the hearth was founded.",
            param="code",
        )
    number = 0
    for digit in digits:
        number = number << 5 | _ALPHABET.index(digit)
    secret = (number >> _CHECK_BITS).to_bytes(_SECRET_BITS // 8, "big")
    if _check(secret) != number & (1 << _CHECK_BITS) - 1:
        raise BadValue(
            "The recovery code is mistyped: its last characters do not fit the rest.",
            fix="Compare it with the paper, character by character.",
            param="code",
        )
    return secret


def _check(secret: bytes) -> int:
    digest = hashlib.sha256(b"hearthnet/recovery-check/v1\0" + secret).digest()
    return int.from_bytes(digest[:2], "big") & (1 << _CHECK_BITS) - 1
