"""The node's key: made once, kept private, refused when it is not."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.errors import BadKey, KeyUnreadable
from mesh.identity.keys import is_node_id, load_or_create, node_id, short_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "Application Support" / "state" / "identity.key"


def test_first_start_makes_a_private_key_that_later_starts_keep(path: Path) -> None:
    key = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create(path).node_id == key.node_id
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]


def test_id_is_the_hash_of_the_public_key(path: Path) -> None:
    key = load_or_create(path)
    digest = hashlib.sha256(key.public_bytes).digest()
    assert key.node_id == "hn1" + base64.b32encode(digest).decode().lower().rstrip("=")
    assert is_node_id(key.node_id)
    assert short_id(key.node_id) == key.node_id[3:9]
    assert key.node_id not in repr(key)


def test_signature_verifies_with_the_public_key(path: Path) -> None:
    key = load_or_create(path)
    public = Ed25519PublicKey.from_public_bytes(key.public_bytes)
    public.verify(key.sign(b"hearthnet/test/v1\0x"), b"hearthnet/test/v1\0x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_that_others_can_read_is_refused(path: Path, mode: int) -> None:
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(KeyUnreadable, match=f"{mode:04o}") as caught:
        load_or_create(path)
    assert caught.value.fix.endswith(f"chmod 600 '{path}'"), "as macOS has a space in it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_key_of_another_user_is_refused(path: Path) -> None:
    load_or_create(path)
    os.chown(path, 12345, -1)
    with pytest.raises(KeyUnreadable, match="12345"):
        load_or_create(path)


def test_link_in_the_place_of_the_key_is_refused(path: Path, tmp_path: Path) -> None:
    load_or_create(path)
    elsewhere = tmp_path / "elsewhere.key"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(KeyUnreadable):
        load_or_create(path)


def test_directory_in_the_place_of_the_key_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(KeyUnreadable):
        load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAA\n"])
def test_broken_key_is_refused_and_kept(path: Path, content: bytes) -> None:
    load_or_create(path)
    path.write_bytes(content)
    with pytest.raises(BadKey):
        load_or_create(path)
    assert path.read_bytes() == content


def test_key_of_another_kind_is_refused(path: Path) -> None:
    load_or_create(path)
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(BadKey):
        load_or_create(path)


def test_daemons_starting_at_once_end_up_with_one_key(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = {key.node_id for key in pool.map(load_or_create, [path] * 16)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    "text", ["", "hn1", "hn1" + "a" * 51, "hn1" + "a" * 53, "hn1" + "A" * 52, "hn2" + "a" * 52]
)
def test_other_text_is_not_a_node_id(text: str) -> None:
    assert not is_node_id(text)
    assert is_node_id(node_id(text.encode()))
