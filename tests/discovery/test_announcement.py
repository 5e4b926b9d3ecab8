"""What is announced fits a packet, and what is heard is checked."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery.announcement import (
    MAX_ADDRESSES,
    MAX_VALUE_BYTES,
    Announcement,
    from_record,
    instance_name,
    is_dialable,
    is_instance,
    summarise,
    to_txt,
)
from mesh.discovery.interfaces import InterfaceChoice
from mesh.identity.keys import node_id
from mesh.types import LayerRange, ModelId

ID = node_id(b"attic")
WIFI = InterfaceChoice("wlan0", IPv4Address("192.168.1.20"), IPv4Network("192.168.1.0/24"), "")
LOOPBACK = InterfaceChoice("lo", IPv4Address("127.0.0.1"), IPv4Network("127.0.0.0/8"), "")
OWN = Announcement(
    instance_name(ID, "0123ab"), ID, "home", "attic", 1, 7700, ("192.168.1.5",), "tiny:0-7"
)


def wire(announcement: Announcement) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in to_txt(announcement).items()}


def test_round_trip() -> None:
    assert from_record(OWN.instance, wire(OWN), ["192.168.1.5"], [WIFI]) == OWN
    assert OWN.endpoints() == ["192.168.1.5:7700"]


@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1),
    models=st.lists(st.text("abcdefgh-/ü", min_size=1, max_size=300), max_size=50),
)
def test_entries_fit_a_packet_whatever_the_names(name: str, models: list[str]) -> None:
    shards = summarise([(ModelId(model), LayerRange(0, 8)) for model in models])
    txt = wire(replace(OWN, name=name, shards=shards))
    assert all(len(key) + 1 + len(value or b"") <= 255 for key, value in txt.items())
    assert sum(len(key) + 2 + len(value or b"") for key, value in txt.items()) < 1000
    read = from_record(OWN.instance, txt, ["192.168.1.5"], [WIFI])
    assert name.startswith(read.name)


def test_summary_counts_what_does_not_fit() -> None:
    shards = [(ModelId("some-model"), LayerRange(n, n + 1)) for n in range(40)]
    text = summarise(shards)
    assert text.startswith("some-model:0-0, some-model:1-1, ")
    shown = text.count("some-model")
    assert text.endswith(f" +{40 - shown}")
    assert len(text.encode()) <= MAX_VALUE_BYTES
    assert summarise([]) == ""
    assert summarise([(ModelId("x" * 300), LayerRange(0, 1))]) == "+1"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"id", node_id(b"other").encode()),
        (b"id", b"kitchen"),
        (b"id", None),
        (b"h", b""),
        (b"n", b"\x1b[31mred"),
        (b"n", b"\xff\xfe"),
        (b"n", b"x" * 201),
        (b"v", b"0"),
        (b"v", b"one"),
        (b"v", b"256"),
        (b"p", b"0"),
        (b"p", b"65536"),
        (b"p", "٣".encode()),
        (b"s", b"a\nb"),
    ],
)
def test_bad_entry_is_refused(key: bytes, value: bytes | None) -> None:
    with pytest.raises(ValueError, match="its"):
        from_record(OWN.instance, {**wire(OWN), key: value}, ["192.168.1.5"], [WIFI])


@pytest.mark.parametrize("addresses", [[], ["8.8.8.8"], ["127.0.0.1"], ["224.0.0.251"], ["x"]])
def test_record_without_a_local_address_is_refused(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="local network"):
        from_record(OWN.instance, wire(OWN), addresses, [WIFI])


def test_addresses_on_our_own_subnet_come_first_and_are_bounded() -> None:
    many = [f"10.0.0.{n}" for n in range(1, 20)]
    read = from_record(OWN.instance, wire(OWN), [*many, "192.168.1.9"], [WIFI])
    assert read.addresses[0] == "192.168.1.9"
    assert len(read.addresses) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.1.2.3", True), ("172.16.0.1", True), ("172.32.0.1", False), ("192.168.9.9", True),
        ("169.254.7.7", True), ("8.8.8.8", False), ("255.255.255.255", False),
        ("0.0.0.0", False),  # noqa: S104
        ("127.0.0.1", False), ("224.0.0.251", False), ("100.64.0.1", False),
    ],
)  # fmt: skip
def test_only_household_addresses_are_dialled(address: str, expected: bool) -> None:
    assert is_dialable(IPv4Address(address), [WIFI]) is expected


def test_chosen_interface_widens_what_is_dialled() -> None:
    campus = InterfaceChoice("eth0", IPv4Address("130.1.2.3"), IPv4Network("130.1.2.0/24"), "")
    assert is_dialable(IPv4Address("130.1.2.9"), [campus])
    assert not is_dialable(IPv4Address("130.1.3.9"), [campus])
    assert is_dialable(IPv4Address("127.0.0.1"), [LOOPBACK])


@pytest.mark.parametrize(
    "name", ["", "printer._hearthnet._tcp.local.", OWN.instance.upper(), OWN.instance + "x"]
)
def test_other_instances_are_not_ours(name: str) -> None:
    assert is_instance(OWN.instance)
    assert not is_instance(name)
