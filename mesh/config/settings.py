"""Every setting of a node, and where each value came from.

Precedence: defaults < TOML file < ``HEARTHNET_...`` environment (ModelExpress' names below it) <
command-line flag. This is the only file that reads the environment. It knows nothing of what the
settings do.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mesh.config.modelexpress import alias_of, from_modelexpress
from mesh.config.problems import first_problem, meanings, unknown
from mesh.config.sections import (
    CoordinationSection,
    DeploymentsSection,
    Devices,
    DistributedInferenceSection,
    JobsSection,
    PolicySection,
    ResearchSection,
    RoutingSection,
)
from mesh.errors import BadValue
from mesh.paths import absolute, default_config_file, default_state_dir, expanded
from mesh.types import LayerRange, is_port

ENV_PREFIX = "HEARTHNET_"
CONFIG_VARIABLE = "HEARTHNET_CONFIG"
_NESTED = "__"
# Not settings of a node: which file to read, and which daemon the client verbs ask.
CLIENT_VARIABLE = "HEARTHNET_HOST"
_NO_SETTINGS = frozenset({CONFIG_VARIABLE, CLIENT_VARIABLE})


def _host_name() -> str:
    return socket.gethostname().partition(".")[0][:64] or "node"


def _split(value: object) -> object:
    """Lists may be written as one comma-separated text."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]
PortNumber = Annotated[int, Field(ge=0, le=65535)]


class Config(BaseModel):
    """All settings of a node. Building one by hand reads neither files nor the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    state_dir: Path = Field(default_factory=default_state_dir)
    """Where this node keeps its identity, logs and runtime file."""
    name: str = Field(default_factory=_host_name, min_length=1, max_length=64)
    """What people call this node. Default: the machine's host name."""
    model: Texts = ("builtin",)
    """Models to hold: ``builtin``, or ``PATH[=ID]`` of a checkpoint directory."""
    layers: Texts = ()
    """Layers to hold, ``LO-HI`` inclusive or ``none``: one for all models or one each, in order.
    Empty: all layers."""
    models_dir: Path | None = None
    """Where models that are fetched are kept, and where those of deployments are looked for, a
    folder each, called like the model with ``/`` as ``--``. Unset: below the user's cache; there,
    in the `models` folder of the state directory and in the hub's cache is looked anyway."""
    port: PortNumber = 8421
    """Port for other nodes; 0 takes a free one."""
    api_port: PortNumber = 8420
    """Port of the HTTP API; 0 takes a free one."""
    api_host: str = "127.0.0.1"
    """Address the HTTP API listens on. Anything but loopback needs a key, and serves TLS."""
    api_key: str | None = None
    """A bearer key with every scope. Set, it is needed on loopback as well. Other keys: `hearthnet
    keys`; one is made and printed when `api_host` is not loopback and there is none."""
    api_tls_cert: Path | None = None
    """A certificate (PEM, with its chain) to serve the HTTP API with. Unset, an API beyond loopback
    serves TLS with the node's own; `hearthnet status` says which."""
    api_tls_key: Path | None = None
    """The private key of `api_tls_cert` (PEM, unencrypted), if it is in another file."""
    peer: Texts = ()
    """Nodes to connect to besides those found by mDNS, ``HOST:PORT``."""
    interface: Texts = ()
    """Interfaces (names or addresses) to use. Empty: the real LAN interfaces."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the weights in memory."""
    quant: Literal["auto", "none", "int8", "int4"] = "none"
    """Bits of a weight where shards compute on a CPU: 8 or 4, at least twice as fast as 16 or 32
    and close to exact; auto takes 8 for the families that allow it."""
    device: Devices = "auto"
    """Where shards compute: ``auto``, the best one; ``all`` cards; or ``cpu``, ``cpu:LO-HI`` (these
    cores), ``cuda``, ``cuda:N`` and ``mps``, several with commas, first the one to fill first."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads of a shard; auto measures once per machine and keeps the number."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log lines to write."""
    deployments: DeploymentsSection = DeploymentsSection()
    """What the hearth wishes to have loaded."""
    jobs: JobsSection = JobsSection()
    """What code of others this node runs, and within what."""
    routing: RoutingSection = RoutingSection()
    """Which layers may run where, for this node's own prompts."""
    coordination: CoordinationSection = CoordinationSection()
    """Where it is kept who holds which model."""
    policy: PolicySection = PolicySection()
    """What the owner of this node allows at all."""
    research: ResearchSection = ResearchSection()
    """The mesh itself; the keys and defaults of its specification."""

    @property
    def distributed(self) -> DistributedInferenceSection:
        """Short for ``research.distributed_inference``."""
        return self.research.distributed_inference

    @property
    def is_distributed(self) -> bool:
        """Whether this node may use others' layers and offer its own; what is unset allows it."""
        return self.policy.research.enable is not False and self.distributed.enabled is not False

    @property
    def api_is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        return is_loopback(self.api_host)

    @property
    def api_is_wildcard(self) -> bool:
        """Whether the API listens on every address of this machine."""
        return ipaddress.ip_address(self.api_host).is_unspecified

    @property
    def is_keyless(self) -> bool:
        """Whether callers of the API on this machine need no key to chat."""
        return self.api_is_loopback and self.api_key is None

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return absolute(value)

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable() or value != value.strip():
            raise ValueError("must be printable, without spaces at its ends")
        return value

    @field_validator("model")
    @classmethod
    def _models(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            path, equals, model_id = text.partition("=")
            if not path or (equals and not model_id):
                raise ValueError(f"{text!r} is not PATH or PATH=ID")
        return value

    @field_validator("layers")
    @classmethod
    def _layers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if text != "none":
                LayerRange.parse(text)
        return value

    @field_validator("peer")
    @classmethod
    def _peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            host, _, port = text.rpartition(":")
            if not host or not is_port(port):
                raise ValueError(f"{text!r} is not HOST:PORT")
        return value

    @field_validator("api_host")
    @classmethod
    def _address(cls, value: str) -> str:
        if value == "localhost":
            return "127.0.0.1"
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            raise ValueError("must be an IP address of this machine, or localhost") from None

    @field_validator("api_tls_cert", "api_tls_key", "models_dir")
    @classmethod
    def _a_file(cls, value: Path | None) -> Path | None:
        return None if value is None else absolute(value)

    @field_validator("api_key")
    @classmethod
    def _header_safe(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch("[A-Za-z0-9_-]{16,}", value) is None:
            raise ValueError("must be at least 16 ASCII letters, digits, - and _")
        return value

    @model_validator(mode="after")
    def _no_key_alone(self) -> Self:
        if self.api_tls_key is not None and self.api_tls_cert is None:
            raise ValueError("api_tls_key is set and api_tls_cert is not")
        return self

    @model_validator(mode="after")
    def _one_layer_range_each(self) -> Self:
        if len(self.layers) not in {0, 1, len(self.model)}:
            raise ValueError(
                f"{len(self.layers)} layer ranges for {len(self.model)} models;"
                " give one for all or one each"
            )
        return self


@dataclass(frozen=True, slots=True)
class Settings:
    """A loaded `Config` with the origin of every dotted key and the TOML file that was read."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None


def load_config(flags: Mapping[str, Any] | None = None, *, file: Path | None = None) -> Settings:
    """Merge all sources. `flags` maps keys to values from the command line; None means not given.

    `file` overrides HEARTHNET_CONFIG, which overrides the default place; a named file must exist.
    Raises BadValue and UnknownKey, naming the key and where it came from.
    """
    path = _config_file(file)
    return _merged(path, _read_toml(path), flags)


def read_as(file: Path, text: str, *, alone: bool = False) -> Settings:
    """What `load_config` would give were `text` in the file, `alone`: without the environment.
    Raises as it does."""
    return _merged(file, parsed(file, text), None, alone=alone)


def config_place(file: Path | None = None) -> Path:
    """The file that `load_config` reads, or would if it were there. Raises BadValue for a named one
    that is not."""
    return _config_file(file) or default_config_file()


def _merged(
    path: Path | None,
    file: dict[str, Any],
    flags: Mapping[str, Any] | None,
    *,
    alone: bool = False,
) -> Settings:
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    layers: list[tuple[dict[str, Any], Callable[[str], str]]] = [
        (file, lambda _key: str(path)),
        ({} if alone else from_modelexpress(os.environ), alias_of),
        ({} if alone else _read_environment(), _variable),
        (given, lambda key: "--" + key.replace("_", "-")),
    ]
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(_keys(), "default")
    for values, origin in layers:
        for key in _merge(merged, values):
            origins[key] = origin(key)
    try:
        config = Config(**merged)
    except ValidationError as error:
        raise first_problem(error, origins, meanings(Config)) from None
    return Settings(config, origins, path)


def is_loopback(host: str) -> bool:
    """Whether an address (or ``localhost``) reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key to value, in the order of the documentation."""
    return _flat(config.model_dump(mode="json"))


def _config_file(file: Path | None) -> Path | None:
    named = file or os.environ.get(CONFIG_VARIABLE)
    if named:
        named = expanded(named)
        if not named.is_file():
            raise BadValue(
                f"There is no configuration file {named}.",
                fix="Correct --config or HEARTHNET_CONFIG.",
                param="config",
            )
        return named
    default = default_config_file()
    return default if default.is_file() else None


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return parsed(path, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def parsed(path: Path, text: str) -> dict[str, Any]:
    """The text of that file as TOML. Raises BadValue."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> BadValue:
    return BadValue(
        f"{path} cannot be read as TOML: {error}.", fix="Correct the file.", param="config"
    )


def _read_environment() -> dict[str, Any]:
    known = {_variable(key): key for key in _keys()}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in known.keys() | _NO_SETTINGS:
            raise unknown(name, sorted(known.keys() | _NO_SETTINGS), "The environment")
    nested: dict[str, Any] = {}
    for name in known.keys() & os.environ.keys():
        *sections, last = known[name].split(".")
        section = nested
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = os.environ[name]
    return nested


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", _NESTED)


def _keys() -> list[str]:
    return list(flatten(Config()))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _merge(target: dict[str, Any], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lay `values` over `target`; the dotted keys that were set."""
    touched: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            below = target.setdefault(key, {})
            if isinstance(below, dict):
                touched += _merge(below, value, f"{prefix}{key}.")
                continue
        target[key] = value
        touched.append(prefix + key)
    return touched
