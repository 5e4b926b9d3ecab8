"""Houses on one switch: daemons in network namespaces whose cable can be pulled out of it.

Needs root, as `tests.chaos.namespaces` does. Everything is asked of a daemon by running the
command inside its namespace, so that a house that is cut off can still be asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cgroups import joining
from tests.chaos.namespaces import PREFIX, ip
from tests.waiting import wait_until

SWITCH = f"{PREFIX}-switch"
NSENTER = shutil.which("nsenter") or "nsenter"
NFT = shutil.which("nft") or "nft"
STREET = "192.0.2.129"
"""The address of this machine on the switch."""
_HEALTH = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SHARD_HEALTH_TIMEOUT_SECONDS"
_STOP_S = 15.0


class House:
    """A namespace with one cable to the switch, and the daemon that lives there."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        self.name = name
        self.address = f"192.0.2.{129 + number}"
        self.state_dir = directory / name
        self.group: Path | None = None
        """The control group in which all that is run here lives; none unless one is set."""
        self.environment: dict[str, str] = {}
        """What is set where somebody types."""
        self._space = f"{PREFIX}-{name}"
        self._cable = f"{PREFIX}s{number}"
        self._daemon: subprocess.Popen[bytes] | None = None

    def build(self) -> None:
        """Make the namespace and plug it in."""
        ip("netns", "add", self._space)
        far = f"{self._cable}f"
        ip("link", "add", self._cable, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", self._space)
        ip("-n", self._space, "addr", "add", f"{self.address}/28", "dev", far)
        for device in ("lo", far):
            ip("-n", self._space, "link", "set", device, "up")
        ip("link", "set", self._cable, "up")
        self.plug()

    def tear_down(self) -> None:
        """Remove all of it, also what an earlier run left."""
        ip("link", "del", self._cable, check=False)
        ip("netns", "del", self._space, check=False)

    def plug(self) -> None:
        """Put the cable into the switch."""
        ip("link", "set", self._cable, "master", SWITCH)

    def unplug(self) -> None:
        """Pull it out: nobody is told."""
        ip("link", "set", self._cable, "nomaster")

    def hearthnet(self, *arguments: str) -> Any:
        """A verb's ``--json``, run in here."""
        code, said = self.ended(*arguments)
        assert code == 0, said
        return said

    def ended(self, *arguments: str) -> tuple[int, Any]:
        """The exit code of a verb as well, whichever it is; what it printed where that is not
        JSON."""
        done = subprocess.run(
            [*self._command(*arguments), "--json"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout or json.dumps(done.stderr))

    def let_in(self, *rules: str) -> None:
        """Of what arrives by the cable only this from now on; without rules, all of it again."""
        done = [
            f"add table inet {PREFIX}", f"delete table inet {PREFIX}", f"add table inet {PREFIX}",
            f"add chain inet {PREFIX} in {{ type filter hook input priority 0; policy drop; }}",
            *(f"add rule inet {PREFIX} in {rule} accept" for rule in ("iif lo", *rules)),
        ]  # fmt: skip
        lines = "\n".join(done if rules else done[:2])
        subprocess.run(
            [NSENTER, f"--net=/run/netns/{self._space}", NFT, "-f", "-"], input=lines, text=True,
            timeout=20, check=True,
        )  # fmt: skip

    def type(self, line: str) -> subprocess.Popen[str]:
        """Begin what somebody types here, who has a home of his own and nothing set."""
        home = self.state_dir.parent / f"{self.name}-home"
        home.mkdir(exist_ok=True)
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("HEARTHNET_", "XDG_"))}
        return subprocess.Popen(
            self._inside(*line.removeprefix("hearthnet").split()),
            env=kept | {"HOME": str(home)} | self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def start(self) -> None:
        """Start the daemon."""
        log = (self.state_dir.parent / f"{self.name}.log").open("ab")
        flags = ("--name", self.name, "--port", "0", "--api-port", "0", "--layers", "none",
                 "--interface", self.address, "--threads", "1")  # fmt: skip
        with log:
            self._daemon = subprocess.Popen(
                self._command("up", *flags),
                env={**os.environ, "OMP_NUM_THREADS": "1", _HEALTH: "3"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        wait_until((self.state_dir / "daemon.json").exists, f"{self.name} starts")

    def stop(self) -> None:
        """End the daemon."""
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.terminate()
            try:
                daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(_STOP_S)

    def members(self) -> dict[str, str]:
        """Names and levels of those who are in, as the daemon knows it."""
        return {m["name"]: m["level"] for m in self.hearthnet("members")["members"]}

    def out(self) -> dict[str, str]:
        """Names of those who are out, and why."""
        return {row["name"]: row["why"] for row in self.hearthnet("members")["out"]}

    def linked(self) -> set[str]:
        """Names of those it has a live link to."""
        return {p["name"] for p in self.hearthnet("peers")["peers"] if p["state"] == "up"}

    def _command(self, *arguments: str) -> list[str]:
        return self._inside(*arguments, "--state-dir", str(self.state_dir))

    def _inside(self, *arguments: str) -> list[str]:
        # Not `ip netns exec`: that takes /sys away as well, where control groups are.
        enter = [NSENTER, f"--net=/run/netns/{self._space}"]
        command = [*enter, sys.executable, "-m", "mesh.cli.main", *arguments]
        return command if self.group is None else joining(self.group, *command)


@contextmanager
def street(directory: Path, names: Sequence[str]) -> Iterator[list[House]]:
    """Houses on one switch, all plugged in, no daemon running."""
    houses = [House(name, number, directory) for number, name in enumerate(names, 1)]
    with ExitStack() as stack:
        ip("link", "del", SWITCH, check=False)
        stack.callback(ip, "link", "del", SWITCH, check=False)
        ip("link", "add", SWITCH, "type", "bridge")
        ip("addr", "add", f"{STREET}/28", "dev", SWITCH)
        ip("link", "set", SWITCH, "up")
        for house in houses:
            house.tear_down()
            stack.callback(house.tear_down)
            house.build()
            stack.callback(house.stop)
        yield houses
