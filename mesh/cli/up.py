"""`hearthnet up`: runs a node here, or leaves one running behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import ConfigFile, StateDir
from mesh.cli.output import note, say
from mesh.cli.starting import require_devices, require_startable, require_there
from mesh.logs import log_to_stderr

if TYPE_CHECKING:
    from mesh.config import Config
    from mesh.paths import StatePaths
    from mesh.runtime import DaemonRecord

Repeated = list[str] | None


def up(  # noqa: PLR0913 - flags
    *,
    model: Annotated[
        Repeated, typer.Option(metavar="PATH[=ID]", help="Directory, GGUF or builtin. Repeatable.")
    ] = None,
    layers: Annotated[
        Repeated, typer.Option(metavar="LO-HI|none", help="Layers to hold; one, or one per model.")
    ] = None,
    state_dir: StateDir = None,
    name: Annotated[str | None, typer.Option(help="What people call this node.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Port for other nodes.")] = None,
    api_port: Annotated[int | None, typer.Option(metavar="N", help="Port of the HTTP API.")] = None,
    api_host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Its address.")] = None,
    peer: Annotated[
        Repeated, typer.Option(metavar="HOST:PORT", help="A node to connect to. Repeatable.")
    ] = None,
    interface: Annotated[
        Repeated, typer.Option(metavar="NAME|ADDRESS", help="An interface to use. Repeatable.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    quant: Annotated[str | None, typer.Option(help="none, int8, int4 or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, all, or some: cuda:0,cpu.")] = None,
    threads: Annotated[str | None, typer.Option(metavar="N", help="CPU threads, or auto.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: ConfigFile = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running and return.")] = False,
    look_only: Annotated[bool, typer.Option("--look-only", hidden=True)] = False,
) -> None:
    """Start a node: hold layers, answer the API, find the others.

    Every flag is also a HEARTHNET_... variable and a key of the TOML file; see `config show`.
    """
    from mesh.config import load_config
    from mesh.paths import StatePaths

    flags = {
        "model": model, "layers": layers, "state_dir": state_dir, "name": name, "port": port,
        "api_port": api_port, "api_host": api_host, "peer": peer, "interface": interface,
        "dtype": dtype, "quant": quant, "device": device, "threads": threads,
        "log_level": log_level,
    }  # fmt: skip
    loaded = load_config(flags, file=config).config
    if look_only:  # for `hearthnet restart`, while another has the ports
        require_there(loaded)
        return
    prepare(loaded, paths := StatePaths(loaded.state_dir).create())
    if detach:
        leave_running(arguments_of(flags, config), paths)
    else:
        _run_here(loaded, paths)


def prepare(config: Config, paths: StatePaths) -> None:
    """What a first start makes, and shows to people only: none of it goes to the daemon's log."""
    require_devices(config.device)
    make_first_key(config, paths)
    found_first_hearth(config, paths)


def make_first_key(config: Config, paths: StatePaths) -> None:
    """Make and print a key when others can reach the API and there is none."""
    if config.api_is_loopback or config.api_key is not None:
        return
    from mesh.clock import SystemClock
    from mesh.identity.api_keys import ApiKeys, Quota, Scope
    from mesh.runtime import sole_use

    with sole_use(paths):
        keys = ApiKeys.load(paths.api_keys)
        if keys.keys:
            return
        require_startable(config)
        scopes = frozenset({Scope.CHAT, Scope.INTERVENTIONS})
        _, text = keys.create("first", scopes, Quota(), SystemClock())
    note(f"API key (shown once; more with `hearthnet keys create`): {text}")


def found_first_hearth(config: Config, paths: StatePaths) -> None:
    """Found a hearth when this node is in none, once its recovery code could be printed."""
    if not config.is_distributed or paths.hearth.exists():
        return
    import asyncio

    from mesh.clock import SystemClock
    from mesh.hearth.founding import found
    from mesh.hearth.record import write_record
    from mesh.identity.keys import load_or_create
    from mesh.runtime import sole_use

    with sole_use(paths):
        if paths.hearth.exists():  # by another `up` just now
            return
        require_startable(config)
        key = load_or_create(paths.identity_key)
        founding = asyncio.run(
            found(key, config.name, paths.events_dir, SystemClock(), lambda report: None)
        )
        # Before the record is kept: a hearth whose code nobody could read would be there for good.
        say(
            f"founded {founding.record.name!r}: distributed inference is on;"
            " `hearthnet invite` lets other machines in"
        )
        note(
            f"recovery code (shown once; write it down): {founding.code}\n"
            "It alone brings back a hearth whose deciding machines are lost or stolen:"
            " `hearthnet members recover` on any that is left."
        )
        write_record(paths.hearth, founding.record)


def leave_running(arguments: Sequence[str], paths: StatePaths, **start: Any) -> None:
    """Start a detached daemon and say where it answers; `start` as in `start_detached`.

    Raises AlreadyRunning, and Exit when it ends instead.
    """
    from mesh.cli.detached import start_detached
    from mesh.runtime import sole_start

    with sole_start(paths):
        record = start_detached(arguments, paths, **start)
    announce(record)


def announce(record: DaemonRecord) -> None:
    """Say where the daemon answers, ready to copy."""
    url = record.public_url or record.api_url
    say(f"hearthnet is up: API {url}, nodes on port {record.port}, pid {record.pid}")
    if record.holds_none:
        say("it serves no layers (--layers none): it asks those of its hearth that do")
    key = "unused" if record.keyless else "KEY  # see `hearthnet keys`"
    say(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")
    if record.certificate is not None:
        from mesh.identity.api_certificate import fingerprint

        say(f"certificate {record.certificate_file}, SHA-256 {fingerprint(record.certificate)}")
        say("on machines that ask here: export SSL_CERT_FILE=COPY of that file")


def arguments_of(flags: Mapping[str, Any], config: Path | None) -> list[str]:
    """What to call ``hearthnet up`` with, to mean the same."""
    arguments: list[str] = []
    for key, value in {**flags, "config": config}.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                arguments += [f"--{key.replace('_', '-')}", str(each)]
    return arguments


def _run_here(config: Config, paths: StatePaths) -> None:
    log_to_stderr(config.log_level, paths.daemon_log)
    from mesh.node.daemon import run

    run(config, on_ready=announce)
