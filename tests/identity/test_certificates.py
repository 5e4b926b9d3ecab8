"""A node's certificate: the same at every start, always valid, good for its own key only."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from mesh.errors import BadKey, UntrustedPeer
from mesh.identity.certificates import (
    NOT_AFTER,
    NOT_BEFORE,
    certificate_node_id,
    check_certificate,
    make_certificate,
)
from mesh.identity.fingerprints import WORDS, fingerprint
from mesh.identity.keys import parse_pem, short_id
from mesh.identity.tls import TlsMaterial
from mesh.processes.messages import Start, encode, reader
from mesh.types import NodeId
from mesh.wire.messages import Hello
from tests.identity.support import Party, new_key


def test_certificate_is_the_same_at_every_start() -> None:
    key = new_key()
    assert make_certificate(key) == make_certificate(parse_pem(key.to_pem()))
    assert make_certificate(key) != make_certificate(new_key())


def test_certificate_names_its_node() -> None:
    key = new_key()
    der = make_certificate(key)
    assert check_certificate(der) == key.public_bytes
    assert certificate_node_id(der) == key.node_id
    name = x509.load_der_x509_certificate(der).subject
    assert name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == key.node_id


@pytest.mark.parametrize("flaw", ["authority", "expires", "other signer", "not ed25519", "junk"])
def test_unfit_anchors_are_refused(flaw: str) -> None:
    key, signer = new_key(), new_key()
    private = serialization.load_pem_private_key(key.to_pem(), None)
    signing = private
    if flaw == "other signer":
        signing = serialization.load_pem_private_key(signer.to_pem(), None)
    if flaw == "not ed25519":
        signing = private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, key.node_id)])
    end = datetime.now(UTC) + timedelta(days=1) if flaw == "expires" else NOT_AFTER
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())  # type: ignore[arg-type]
        .serial_number(1)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=flaw == "authority", path_length=None), True)
        .sign(signing, SHA256() if flaw == "not ed25519" else None)  # type: ignore[arg-type]
    )
    der = certificate.public_bytes(serialization.Encoding.DER) if flaw != "junk" else b"\x30\x03"
    with pytest.raises(UntrustedPeer):
        check_certificate(der)


def test_material_survives_the_way_to_a_child_and_hides_its_key() -> None:
    material = TlsMaterial.of(new_key(), [Party("x").certificate])
    start: Start[None] = Start(hello=Hello("n", "n", "tensors", "test"), tls=material)
    assert reader([Start])(encode(start)) == start
    assert "PRIVATE" not in repr(material)
    with pytest.raises(UntrustedPeer):
        replace(material, key_pem=new_key().to_pem())
    with pytest.raises(BadKey):
        replace(material, key_pem=b"junk")


def test_words_are_told_apart_by_their_first_letters() -> None:
    assert len(WORDS) == 256
    assert len({word[:4] for word in WORDS}) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_fingerprint_is_four_words_and_six_characters() -> None:
    key = new_key()
    words, characters = fingerprint(key.node_id).split(" ")
    assert [word in WORDS for word in words.split("-")] == [True] * 4
    assert characters == short_id(key.node_id)
    assert fingerprint(key.node_id) == fingerprint(key.node_id)
    assert fingerprint(key.node_id) != fingerprint(new_key().node_id)


def test_fingerprint_never_changes_between_versions() -> None:
    assert fingerprint(NodeId("hn1" + "a" * 52)) == "acorn-acorn-acorn-acorn aaaaaa"
    assert fingerprint(NodeId("hn1" + "7" * 51 + "q")).startswith("zinc-zinc-zinc-zinc ")


@pytest.mark.parametrize("text", ["", "hn1abc", "amber"])
def test_fingerprint_of_no_node_id_is_refused(text: str) -> None:
    with pytest.raises(BadKey):
        fingerprint(NodeId(text))


def test_a_certificate_of_an_unknown_version_is_refused() -> None:
    der = make_certificate(new_key())
    version = b"\xa0\x03\x02\x01"
    assert version + b"\x02" in der
    with pytest.raises(UntrustedPeer, match="cannot be read"):
        check_certificate(der.replace(version + b"\x02", version + b"\x3b", 1))


@pytest.mark.parametrize("warned", ["error", "ignore"])
def test_a_certificate_whose_number_is_negative_is_refused_by_every_version(
    warned: Literal["error", "ignore"],
) -> None:
    key = new_key()
    private = serialization.load_pem_private_key(key.to_pem(), None)
    assert isinstance(private, Ed25519PrivateKey)
    der = make_certificate(key)
    whole = x509.load_der_x509_certificate(der)
    size = whole.serial_number.bit_length() // 8 + 1
    number, negative = whole.serial_number.to_bytes(size, "big"), b"\x80".ljust(size, b"\x00")
    signed = whole.tbs_certificate_bytes.replace(number, negative, 1)
    forged = der.replace(whole.tbs_certificate_bytes, signed)[:-64] + private.sign(signed)
    with warnings.catch_warnings():
        warnings.simplefilter(warned)
        with pytest.raises(UntrustedPeer, match="cannot be read"):
            check_certificate(forged)
