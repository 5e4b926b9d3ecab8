"""Which interfaces are announced on, and why the others are not."""

from __future__ import annotations

from ipaddress import IPv4Interface

import pytest

from mesh.discovery.interfaces import Interface, Reach, choose, read_table, select, told
from mesh.errors import BadValue


def interface(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name, up, tuple(IPv4Interface(a) for a in addresses))


LO = interface("lo", "127.0.0.1/8")
WIFI = interface("wlp3s0", "192.168.1.20/24")
CABLE = interface("enp2s0", "192.168.1.21/24")
DOCKER = interface("docker0", "172.17.0.1/16")


def test_every_real_interface_is_used_and_every_other_has_a_reason() -> None:
    table = [
        LO, WIFI, CABLE, DOCKER,
        interface("enp9s0", "10.0.0.2/24", up=False),
        interface("eno1"),
    ]  # fmt: skip
    chosen, skipped = select(table, [])
    assert [(c.name, str(c.address)) for c in chosen] == [
        ("wlp3s0", "192.168.1.20"),
        ("enp2s0", "192.168.1.21"),
    ]
    reasons = {s.name: str(s) for s in skipped}
    assert reasons.keys() == {"lo", "docker0", "enp9s0", "eno1"}
    assert "container bridge" in reasons["docker0"]
    assert "--interface docker0" in reasons["docker0"]
    assert "down" in reasons["enp9s0"]
    assert "no IPv4 address" in reasons["eno1"]
    assert str(chosen[0]) == "wlp3s0 (192.168.1.20): local network"


def test_people_are_told_what_is_used_and_what_is_not() -> None:
    used, skipped = told([], [LO, WIFI, DOCKER])
    assert [row["name"] for row in told([], [LO])] == ["lo"], "where nothing else is used"
    assert used == {
        "name": "wlp3s0", "address": "192.168.1.20", "network": "192.168.1.0/24", "used": True,
        "why": "local network",
    }  # fmt: skip
    assert (skipped["name"], skipped["used"], skipped["address"]) == ("docker0", False, None)
    (gone,) = told(["wlp3s0", "usb0"], [LO, WIFI])
    assert (gone["name"], gone["used"]) == ("usb0", False)
    assert "no interface 'usb0'" in gone["why"]
    with pytest.raises(BadValue) as caught:
        select([LO, WIFI, Interface("eth0", True, ())], ["eth0"])
    said = "Give eth0 one, or use one of: lo (127.0.0.1), wlp3s0 (192.168.1.20)."
    assert caught.value.fix == said, "nodes call each other over IPv4"


def test_one_address_that_was_asked_for_is_the_only_one_to_listen_at() -> None:
    assert Reach.of(["127.0.0.1"], "127.0.0.1") is None
    assert Reach.of([], "127.0.0.1") is not None
    assert Reach.of(["lo"], "127.0.0.1") is not None
    assert Reach.of(["127.0.0.1", "10.0.0.1"], "127.0.0.1") is not None


def test_what_is_answered_at_follows_the_interfaces() -> None:
    table = [LO, DOCKER]
    reach = Reach([], "127.0.0.1", lambda: table, look_every_s=0.0)
    assert [reach(a) for a in ("127.0.0.1", "172.17.0.1", "192.168.1.20")] == [True, False, False]
    table.append(WIFI)  # the network comes up
    assert [reach(a) for a in ("127.0.0.1", "172.17.0.1", "192.168.1.20")] == [True, False, True]
    assert reach("127.0.0.1"), "its own processes are reached there"
    table[:] = [LO]
    assert not reach("192.168.1.21")
    assert not reach("192.168.1.20")


def test_an_interface_that_went_away_is_no_error() -> None:
    reach = Reach(["gone0"], "127.0.0.1")
    assert not reach("192.168.1.20")
    assert reach("127.0.0.1")


@pytest.mark.parametrize(
    "name",
    [
        "docker0", "docker_gwbridge", "br-1a2b3c4d5e6f", "veth12ab", "cni0", "virbr0", "tun0",
        "tap3", "wg0", "tailscale0", "utun4", "awdl0", "llw0", "ztabcdef12", "vmnet8", "podman0",
        "feth1234", "bridge100", "vmenet0",
        "lxdbr0", "ppp0", "flannel.1", "cali12345",
    ],
)  # fmt: skip
def test_virtual_interfaces_are_skipped(name: str) -> None:
    chosen, skipped = select([WIFI, interface(name, "10.9.8.7/24")], [])
    assert [c.name for c in chosen] == ["wlp3s0"]
    assert [s.name for s in skipped] == [name]


@pytest.mark.parametrize(
    "name", ["eth0", "en0", "enp3s0", "wlan0", "wlp2s0", "br0", "bridge0", "bond0", "usb0"]
)
def test_real_interfaces_are_used(name: str) -> None:
    assert [c.name for c in select([interface(name, "10.9.8.7/24")], [])[0]] == [name]


@pytest.mark.parametrize("asked", [["docker0"], ["172.17.0.1"], ["docker0", "172.17.0.1"]])
def test_an_interface_that_is_asked_for_is_taken_whatever_it_is(asked: list[str]) -> None:
    chosen, skipped = select([LO, WIFI, DOCKER], asked)
    assert [str(c.address) for c in chosen] == ["172.17.0.1"]
    assert {s.name for s in skipped} == {"lo", "wlp3s0"}


def test_without_a_network_loopback_is_used_and_says_so() -> None:
    chosen, skipped = select([LO, DOCKER], [])
    assert [str(c.address) for c in chosen] == ["127.0.0.1"]
    assert "only nodes on this machine" in chosen[0].reason
    assert [s.name for s in skipped] == ["docker0"]


def test_unknown_interface_names_those_that_exist() -> None:
    with pytest.raises(BadValue) as caught:
        select([LO, WIFI], ["eth7"])
    assert "wlp3s0 (192.168.1.20)" in caught.value.fix


@pytest.mark.parametrize("asked", ["lo", "127.0.0.1"])
def test_this_machine_has_loopback(asked: str) -> None:
    if asked == "lo" and not any(i.name == "lo" for i in read_table()):
        pytest.skip("loopback has another name here")
    chosen, _ = choose([asked])
    assert "127.0.0.1" in [str(c.address) for c in chosen]
