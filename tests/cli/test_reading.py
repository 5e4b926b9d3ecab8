"""Help, version and the verbs that only read."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from mesh.cli.deploying import in_words
from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord
from tests.api.conftest import Served, serving, with_key
from tests.cli.conftest import COMMAND, Run, answering
from tests.tui.house import whole

if TYPE_CHECKING:
    from mesh.api.services import HearthControl

HEAVY = (
    "torch", "transformers", "textual", "starlette", "uvicorn", "httpx", "pydantic", "numpy",
    "rich", "prompt_toolkit", "markdown_it", "msgspec",
)  # fmt: skip
LIST_MODULES = (
    "import sys; from mesh.cli.main import main\n"
    "try: main()\nfinally: print(*(name for name, loaded in sys.modules.items() if loaded))"
)


async def test_status_says_what_keeps_a_node_from_serving_and_how_far_every_span_is(
    daemon: Served, hearthnet: Run
) -> None:
    plain, house = daemon.view.status, whole()
    parts = {name: house[name] for name in ("deployments", "weights", "processes")}
    parts["node"] = {**plain()["node"], "paused": True}
    daemon.view.status = lambda: {**plain(), **parts}  # type: ignore[method-assign]
    text = " ".join((await hearthnet("status")).out.split())
    assert "paused: others get nothing from it, until `hearthnet resume`" in text
    assert "out of order: the jobs' process is ended: killed by signal 9" in text
    assert text.count("out of order") == 1
    assert "qwen PROVISIONING (WARM) - 1 of 2 kitchen 0-11 is ready" in text
    assert "sofa 12-15 is being fetched, 34 %" in text
    assert "study 0-3 failed: needs 900 MiB, 300 MiB are free" in text
    begun = {"phase": "PROVISIONING", "done_bytes": 0, "total_bytes": 0, "reason": None}
    assert in_words(begun) == "is looked for", "it may be on the disk already"


async def test_help_loads_nothing_heavy(environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIST_MODULES, "--help",
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    out, _ = await process.communicate()
    *text, loaded = out.decode().splitlines()
    assert "Exit codes: 0 ok" in "\n".join(text)
    assert {name.partition(".")[0] for name in loaded.split()}.isdisjoint(HEAVY)
    assert "mesh.cli.chat" in loaded


async def test_every_verb_has_help(hearthnet: Run) -> None:
    listing = (await hearthnet("--help")).out
    verbs = ("up", "down", "status", "chat", "run", "peers", "models", "config", "demo")
    for verb in verbs:
        assert f" {verb} " in listing
    narrow = [await hearthnet(*words, "-h", COLUMNS="80") for words in ((), ("members",))]
    assert not [each.out for each in narrow if each.out.partition("Commands:")[2].count("...")]
    shown = await hearthnet("up", "--help")
    for flag in (
        "--model", "--layers", "--state-dir", "--port", "--api-port", "--peer", "--interface",
        "--name", "--dtype", "--device", "--threads", "--config", "--detach",
    ):  # fmt: skip
        assert flag in shown.out


async def test_a_verb_that_is_called_otherwise_here_is_named(hearthnet: Run) -> None:
    for typed, meant in (
        ("leave", "members leave"),
        ("install", "service install"),
        ("ps", "status"),
    ):
        finished = await hearthnet(typed, "attic")
        assert finished.code == 2
        assert f"No such command {typed!r}. Did you mean {meant!r}?" in finished.err
    assert "Did you mean 'status'" in (await hearthnet("statu")).err


async def test_version(fresh: Run) -> None:
    finished = await fresh("--version")
    assert finished.code == 0
    assert finished.out.startswith("hearthnet ")


async def test_bare_command_without_a_daemon_says_how_to_begin(fresh: Run) -> None:
    finished = await fresh()
    assert (finished.code, len(finished.out.splitlines())) == (0, 3)
    assert "hearthnet up" in finished.out


async def test_bare_command_says_in_three_lines_what_is(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet()
    assert finished.code == 0
    assert finished.out.splitlines() == [
        "here is up in the house with attic[2J; it holds echo 0-5.",
        "echo answers.",
        "next: hearthnet chat",
    ]


async def test_reading_verbs_print_json(hearthnet: Run, daemon: Served) -> None:
    status = await hearthnet("status", "--json")
    assert status.code == 0
    assert json.loads(status.out) == daemon.view.status()
    assert "\x1b" not in status.out
    peers = await hearthnet("peers", "--json")
    assert json.loads(peers.out) == {"peers": daemon.view.peers()}
    models = await hearthnet("models", "--json")
    assert json.loads(models.out) == {"models": daemon.view.models()}


async def test_tables_are_plain_and_harmless_in_a_pipe(hearthnet: Run, daemon: Served) -> None:
    models = await hearthnet("models")
    assert models.out.splitlines()[0].split() == ["MODEL", "LAYERS", "STATE", "CONTEXT", "NODES"]
    assert "missing layers 8-11" in models.out
    peers = await hearthnet("peers")
    row = peers.out.splitlines()[1]
    assert row.startswith("attic[2J  pppppp  up     0.0.9 (newer)  0.7")  # its escape is gone
    status = await hearthnet("status")
    assert "network: eth0 192.0.2.5, local network\nnetwork: not wg0: it is down\n" in status.out
    assert "held here: echo 0-5" in status.out
    how_far = "48 % packed (325.1 of 671.1 MB)"
    assert f"loading: slow:0-3 · {how_far} · needs 812 MiB · for 2 s\n" in status.out
    held = "3 of 8 streams, 1.5 of 16 MiB buffered, 7 events per minute"
    assert re.search(rf"attic\S*  echo:0-5  {held}  2\n", status.out)
    assert "warning: The disk is nearly full. Free some. (3 h ago)\n" in status.err
    assert "device=cpu: no accelerator found" in status.err
    assert not any("\x1b" in text for text in (models.out, peers.out, status.out, status.err))


async def test_status_leaves_out_what_matters_to_few_unless_all_is_wanted(
    hearthnet: Run, daemon: Served
) -> None:
    plain = daemon.view.status
    notes = ["device cpu: no card", *(f"echo:0-5: note {number}" for number in range(4))]
    daemon.view.status = lambda: {**plain(), "reasons": notes}  # type: ignore[method-assign]
    short, whole = await hearthnet("status"), await hearthnet("status", "--all")
    assert [line for line in short.err.splitlines() if line.startswith("note")] == [
        "note: device cpu: no card", "note: echo:0-5: note 0", "note: echo:0-5: note 1",
        "note: 2 more on how the models are computed: `hearthnet status --all`",
    ]  # fmt: skip
    assert [line for line in whole.err.splitlines() if line.startswith("note")] == [
        f"note: {note}" for note in notes
    ]


async def test_interfaces_that_are_left_out_are_counted_where_there_are_many(
    hearthnet: Run, daemon: Served
) -> None:
    plain = daemon.view.status
    veths = [{"name": f"veth{n}", "used": False, "why": f"link {n}"} for n in range(6)]
    down = [{"name": f"ifb{n}", "used": False, "why": "it is down"} for n in range(2)]
    node = {**plain()["node"], "interfaces": down + veths}
    daemon.view.status = lambda: {**plain(), "node": node}  # type: ignore[method-assign]
    short, whole = await hearthnet("status"), await hearthnet("status", "--all")
    assert "network: not ifb0, ifb1: it is down\nnetwork: not veth0: link 0\n" in short.out
    assert "network: not veth2: link 2\nnetwork: not 3 others: " in short.out
    assert "veth3" not in short.out
    assert "network: not veth5: link 5\n" in whole.out


@pytest.mark.parametrize(
    ("verb", "remedy"),
    [
        ("status", "hearthnet up"), ("chat", "hearthnet up"), ("run", "hearthnet up"),
        ("down", "nothing to stop"), ("pause", "nothing to pause"), ("resume", "hearthnet up"),
        ("restart", "hearthnet up"),
    ],
)  # fmt: skip
async def test_no_daemon_is_exit_code_3_with_a_fix(hearthnet: Run, verb: str, remedy: str) -> None:
    finished = await hearthnet(verb, *(["echo", "hi"] if verb == "run" else []))
    assert finished.code == 3
    assert finished.out == ""
    error, fix = finished.err.splitlines()
    assert error.startswith("error: No hearthnet daemon runs")
    assert remedy in fix


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_file_without_certificates_is_named(
    hearthnet: Run, tmp_path: Path, is_there: bool
) -> None:
    file = tmp_path / "attic.pem"  # as `get_server_certificate` leaves it where nobody answers
    if is_there:
        file.touch()
    finished = await hearthnet(
        "models", "--host", "https://192.0.2.1:8420", SSL_CERT_FILE=str(file)
    )
    assert finished.code == 2
    assert "SSL_CERT_FILE names no file with certificates" in finished.err


async def test_daemon_is_found_by_port_host_and_environment(hearthnet: Run, daemon: Served) -> None:
    port = str(daemon.server.port)
    elsewhere = {"HEARTHNET_STATE_DIR": "/nonexistent"}
    assert (await hearthnet("peers", **elsewhere)).code == 3
    assert (await hearthnet("peers", "--api-port", port, **elsewhere)).code == 0
    assert (await hearthnet("peers", "--host", daemon.url, **elsewhere)).code == 0
    assert (await hearthnet("peers", HEARTHNET_HOST=f"127.0.0.1:{port}", **elsewhere)).code == 0
    gone = await hearthnet("peers", "--api-port", "1")
    assert (gone.code, "Nothing answers at" in gone.err) == (3, True)


@pytest.mark.parametrize(
    ("host", "remedy"),
    [("127.0.0.1", "`hearthnet restart`"), ("255.255.255.255", "--api-host 0.0.0.0")],
)
async def test_a_daemon_that_runs_where_nothing_answers_any_more_is_not_to_be_started_again(
    hearthnet: Run, tmp_path: Path, host: str, remedy: str
) -> None:
    """As when this machine had another address as the daemon started."""
    paths = await asyncio.to_thread(StatePaths(tmp_path / "moved").create)
    record = await asyncio.to_thread(leave_record, paths, f"http://{host}:1")
    gone = await hearthnet("status", "--state-dir", str(paths.root))
    assert (gone.code, f"its daemon runs here, as process {record.pid}" in gone.err) == (3, True)
    assert remedy in gone.err
    assert "hearthnet up`, or name" not in gone.err


@pytest.mark.parametrize(
    "host",
    ["http://localhost:abc", "http://localhost:99999", "http://[::1", "\udcff", "http://x/\udcff"],
)
async def test_a_host_that_is_no_url_is_refused(hearthnet: Run, host: str) -> None:
    finished = await hearthnet("peers", "--host", host)
    assert (finished.code, finished.out) == (2, "")
    assert "is no URL: " in finished.err
    assert "[bad_value]" in finished.err


@pytest.mark.parametrize("answer", [b"<html>It works!</html>", b"[]", b"\xff", b""])
async def test_what_is_no_daemon_is_said_to_be_none(hearthnet: Run, answer: bytes) -> None:
    async with answering(answer) as host:
        finished = await hearthnet("peers", "--host", host)
    assert (finished.code, finished.out) == (1, "")
    assert "is not a hearthnet daemon" in finished.err


async def test_what_a_daemon_of_another_version_does_not_say_is_named(hearthnet: Run) -> None:
    async with answering(b'{"models": [{"id": "toy", "total_layers": 4}]}') as host:
        finished = await hearthnet("models", "--host", host)
    assert (finished.code, finished.out) == (1, "")
    assert "it is of another version than this `hearthnet`. [version_mismatch]" in finished.err
    assert "hearthnet restart" in finished.err


async def test_whoever_hangs_up_is_said_not_to_be_the_api(hearthnet: Run) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finished = await hearthnet("status", "--host", host)
    assert (finished.code, finished.out) == (1, "")
    assert "the API is elsewhere" in finished.err
    assert "--api-port" in finished.err


async def test_wrong_key_is_exit_code_6(hearthnet: Run) -> None:
    key = "k" * 20
    async with serving(with_key(key)) as api:
        refused = await hearthnet("peers", "--host", api.url)
        assert (refused.code, "[unauthorized]" in refused.err) == (6, True)
        assert (await hearthnet("peers", "--host", api.url, HEARTHNET_API_KEY=key)).code == 0
        made = await hearthnet(
            "keys", "create", "--name", "phone", "--scope", "admin", "--host", api.url,
            HEARTHNET_API_KEY=key,
        )  # fmt: skip
        phone = made.out.strip()
        assert (await hearthnet("peers", "--host", api.url, HEARTHNET_API_KEY=phone)).code == 0


async def test_config_show_names_origins(hearthnet: Run) -> None:
    finished = await hearthnet(
        "config", "show", "--origin", "--json",
        HEARTHNET_PORT="9", HEARTHNET_API_KEY="s" * 16,
    )  # fmt: skip
    shown = json.loads(finished.out)
    assert shown["port"] == {"value": 9, "origin": "HEARTHNET_PORT"}
    assert shown["api_port"] == {"value": 8420, "origin": "default"}
    assert shown["api_key"]["value"] == "(set)"


async def test_what_rests_soon_says_in_how_long(hearthnet: Run, daemon: Served) -> None:
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    plain, house, models = daemon.view.status, whole(), daemon.view.models()
    llama, qwen = house["deployments"]
    rows = [{**llama, "rests_at": soon}, {**qwen, "in_use": True}]
    ready = [{**models[0], "rests_at": soon}, models[1]]
    daemon.view.status = lambda: {**plain(), "deployments": rows}  # type: ignore[method-assign]
    daemon.view.models = lambda: ready  # type: ignore[method-assign]
    text = " ".join((await hearthnet("status")).out.split())
    assert "echo 12 ready, rests in 5 min 2048" in text
    assert "llama READY (HOT) 5 min 1 of 1 sofa" in text
    assert "qwen PROVISIONING (WARM) in use 1 of 2 kitchen" in text


def test_standard_streams_may_be_closed(environment: dict[str, str]) -> None:
    """As where a scheduler starts it."""
    for redirected in ("chat <&-", "config show >&-", "chat <&- >&- 2>&-"):
        command = f"{shlex.join(COMMAND)} {redirected}"
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "bug" in done.stderr) == (3 if "chat" in redirected else 0, False)


def test_a_user_without_a_home_is_told_so(environment: dict[str, str], tmp_path: Path) -> None:
    nobody = ["unshare", "--user", "--map-user=54321"]
    try:
        subprocess.run([*nobody, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nobody can be made whom the system does not know")
    del environment["HOME"]

    def said(*arguments: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(
            [*nobody, *COMMAND, *arguments],
            env=environment | more,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr.partition("\n")[0]

    homeless = (2, "error: This user has no home directory. [bad_value]")
    assert said("config", "path") == homeless
    elsewhere = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("STATE", "CONFIG", "CACHE")}
    assert said("service", "status", **elsewhere) == homeless
    code, why = said("run", "builtin", "Hi", **elsewhere)
    assert (code, "[not_running]" in why) == (3, True)
    code, why = said("status", "--state-dir", "~nosuchuser/x", **elsewhere)
    assert (code, "in the home of a user that is not known here" in why) == (2, True)


class EarlierControl:
    """The hearth of a daemon that was not started again since its package is a newer one."""

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        return {"code": "amber-river-42", "qr": "", "host": "h", "port": 9, "level": "trusted"}

    async def invitation(self, port: int) -> dict[str, Any]:
        return {"open": False, "ending": "used", "name": "barn", "error": None}

    async def join(self, code: str, peer: str | None) -> dict[str, Any]:
        return {"id": "hh2", "name": "the house"}


async def test_an_upgrade_needs_no_restart_for_somebody_to_come_in(
    hearthnet: Run, tmp_path: Path
) -> None:
    paths = await asyncio.to_thread(StatePaths(tmp_path / "earlier").create)
    control = cast("HearthControl", EarlierControl())
    async with serving(with_key("secret"), control=control) as served:
        await asyncio.to_thread(leave_record, paths, served.url)
        here = ("--state-dir", str(paths.root))
        invited = await hearthnet("invite", *here)
        assert invited.out.splitlines()[-1] == "barn joined as trusted.", invited.err
        joined = await hearthnet("join", "amber-river-42", *here)
        said = "This node is in 'the house' now; distributed inference is on.\n"
        assert joined.out == said, joined.err


def leave_record(paths: StatePaths, url: str) -> DaemonRecord:
    """As of a daemon at this URL, in this process."""
    record = DaemonRecord.for_this_process(api_url=url, api_port=1, port=2, api_key="secret")
    record.write(paths.runtime_file)
    return record
