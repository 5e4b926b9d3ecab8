"""Where hearthnet keeps its files: every path in one place.

One state directory per node holds everything that must survive a restart or must stay private; it
is 0700. Nothing here decides which state directory is used (`mesh.config` does) or what is inside
the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from mesh.errors import BadValue

_APP = "hearthnet"


def default_state_dir() -> Path:
    """The node's state directory when nobody names another. Raises BadValue without a home."""
    return _at_home(lambda: platformdirs.user_state_path(_APP, appauthor=False))


def default_config_file() -> Path:
    """The TOML file that is read when it exists and nobody names another. Raises BadValue without a
    home."""
    return _at_home(lambda: platformdirs.user_config_path(_APP, appauthor=False)) / "config.toml"


def cache_dir() -> Path:
    """What can be computed again, such as manifests and hashes; shared by a user's nodes. Raises
    BadValue without a home."""
    return _at_home(lambda: platformdirs.user_cache_path(_APP, appauthor=False))


def home_dir() -> Path:
    """This user's. Raises BadValue where there is none."""
    return _at_home(Path.home)


def expanded(path: str | Path) -> Path:
    """The path, with the home that a ``~`` at its beginning means. Raises BadValue."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadValue(
            f"{path} is in the home of a user that is not known here.", fix="Write the whole path."
        ) from None


def capacity_dir() -> Path:
    """How fast this machine is, a file per machine and device (`mesh.node.own_capacity`)."""
    return cache_dir() / "capacity"


def models_dir() -> Path:
    """Where checkpoints that were fetched lie, a directory each; shared by a user's nodes."""
    return cache_dir() / "models"


def quantised_dir(cache: Path, weights_sha256: str) -> Path:
    """What was rounded of a checkpoint's weights (`mesh.shard.compiled.store`)."""
    return cache / "quantised" / weights_sha256


def absolute(path: Path) -> Path:
    """The path from the root, as `expanded`; links stay. Raises BadValue."""
    try:
        return Path(os.path.abspath(expanded(path)))  # noqa: PTH100 - keep symlinks
    except FileNotFoundError:
        raise BadValue(
            f"{path} is below the current directory, which is gone.", fix="Go to one that is there."
        ) from None


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The files of one node, below its state directory."""

    root: Path

    @property
    def identity_key(self) -> Path:
        """The node's private key (0600); whoever has it is this node."""
        return self.root / "identity.key"

    @property
    def hearth(self) -> Path:
        """Which hearth the node is in, and whom it was told of as it joined (0600)."""
        return self.root / "hearth.json"

    @property
    def epoch(self) -> Path:
        """How far this node's starts have counted (0600); see `mesh.hearth.epoch`."""
        return self.root / "epoch"

    @property
    def named_checkpoints(self) -> Path:
        """Where the checkpoints lie that were deployed by their paths."""
        return self.root / "named-checkpoints.json"

    @property
    def begun_pulls(self) -> Path:
        """The pulls that have not ended (0600); see `mesh.transfers.begun`."""
        return self.root / "pulls.json"

    @property
    def models_dir(self) -> Path:
        """Checkpoints that were put here for this node, a folder each, called like the model."""
        return self.root / "models"

    @property
    def steering_dir(self) -> Path:
        """The files of steering edits, each named by its hash."""
        return self.root / "steering"

    @property
    def harvest_dir(self) -> Path:
        """Activations that harvests left here, a directory per run."""
        return self.root / "harvest"

    @property
    def memory_dir(self) -> Path:
        """What this node's processes have taken of what they may (`processes.memory_budget`)."""
        return self.root / "memory"

    @property
    def threads_dir(self) -> Path:
        """With how many threads this node computes, a file per machine (`mesh.shard.threads`)."""
        return self.root / "threads"

    @property
    def events_dir(self) -> Path:
        """The signed logs, a file per hearth."""
        return self.root / "events"

    @property
    def api_keys(self) -> Path:
        """The API keys' hashes, scopes and quotas (0600)."""
        return self.root / "api-keys.json"

    @property
    def api_certificate(self) -> Path:
        """The certificate of an HTTP API that others reach; for their machines to trust."""
        return self.root / "api-cert.pem"

    @property
    def api_certificate_key(self) -> Path:
        """Its private key (0600)."""
        return self.root / "api-cert.key"

    @property
    def jobs_dir(self) -> Path:
        """nnsight clients' jobs: their table, payloads and results (0700)."""
        return self.root / "jobs"

    @property
    def coordination(self) -> Path:
        """Who holds which model, as this node knew it last (0600)."""
        return self.root / "coordination.db"

    @property
    def chat_history(self) -> Path:
        """What was typed into `hearthnet chat`, for the arrow keys (0600)."""
        return self.root / "chat-history"

    @property
    def chats_dir(self) -> Path:
        """Conversations that `/save` kept, a file each (0600)."""
        return self.root / "chats"

    @property
    def lock(self) -> Path:
        """Locked by the one process that uses the directory (see `mesh.runtime`)."""
        return self.root / "lock"

    @property
    def start_lock(self) -> Path:
        """Locked by the one command that starts a daemon there (see `mesh.runtime`)."""
        return self.root / "start.lock"

    @property
    def runtime_file(self) -> Path:
        """Written while a daemon runs: where it listens (see `mesh.runtime`)."""
        return self.root / "daemon.json"

    @property
    def logs_dir(self) -> Path:
        """Log files."""
        return self.root / "logs"

    @property
    def daemon_log(self) -> Path:
        """What a detached daemon prints."""
        return self.logs_dir / "daemon.log"

    def create(self) -> StatePaths:
        """Make the directories, readable by their owner only; returns self. Raises BadValue."""
        for directory in (self.root, self.logs_dir, self.events_dir):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
            except OSError as error:
                raise BadValue(
                    f"{directory} cannot be made a directory of this node: {error.strerror}.",
                    fix="See whose it is (what `sudo` made belongs to root) and whether its disk"
                    " takes writes, or name a --state-dir that you may write to.",
                    param="state_dir",
                ) from error
            if directory.stat().st_mode & 0o077:
                raise BadValue(
                    f"{directory} stays open to others: its file system keeps no permissions.",
                    fix="Name a --state-dir on another, or mount this one for this user alone"
                    " (with the options uid and umask=077).",
                    param="state_dir",
                )
        return self


def _at_home(found: Callable[[], Path]) -> Path:
    try:
        return found()
    except RuntimeError:  # no HOME, and the system does not know the user, as in some containers
        raise BadValue(
            "This user has no home directory.", fix="Set HOME to a directory of this user's."
        ) from None
