"""From a client's model key to a model of this node.

A key names a class and, as JSON, a checkpoint: ``nnsight….TransformersModel:{"repo_id": …}``.
Keys are compared by their parts, never as texts, and nothing that a key names is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mesh.codec import Fault, convert, parse_json, read_file
from mesh.errors import BadRequest, ModelNotFound
from mesh.models.hub_cache import hub_snapshot
from mesh.types import ModelId

TASK = "text-generation"
_CLASSES = ("TransformersModel", "LanguageModel")
_PREFIX = "nnsight.modeling.transformers.TransformersModel"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class _Parts:
    repo_id: str
    revision: str | None = None
    task: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The content of a model key. `revision` is None for the main one."""

    repo_id: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Raises BadRequest, also for what no node of ours serves."""
        name, _, rest = text.partition(":")
        try:
            parts = convert(parse_json(rest), _Parts, closed=True)
        except Fault as fault:
            said = f"{text[:200]!r} is not a model key."
            raise _refused(said, "Let nnsight make it.") from fault
        # A class of the client's own is derived from one of nnsight's, and comes with the request.
        if name.startswith("nnsight.") and name.rpartition(".")[2] not in _CLASSES:
            raise _refused(
                f"Models of the class {name[:100]!r} are not served here.",
                f"Use {' or '.join(_CLASSES)}.",
            )
        if parts.task not in (None, TASK):
            raise _refused(f"The task {parts.task[:50]!r} is not served.", f"Use task={TASK!r}.")
        if parts.trust_remote_code:
            raise _refused(
                "This node never runs code that comes with a checkpoint.",
                "Leave trust_remote_code out.",
            )
        return cls(parts.repo_id, None if parts.revision == "main" else parts.revision)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of this node and the names that clients know it by."""

    model_id: ModelId
    directory: Path
    hub_ids: tuple[str, ...]
    snapshot: str | None

    @classmethod
    def read(cls, model_id: ModelId, directory: Path) -> ServedModel:
        """Look at the checkpoint's place and at its ``config.json``. Blocks."""
        real = directory.resolve()
        cached = hub_snapshot(real)
        hub_ids = [cached.repo_id] if cached else []
        try:
            named = read_file(real / "config.json", dict[str, Any]).get("_name_or_path")
        except (OSError, Fault):
            named = None
        if isinstance(named, str) and _HUB_ID.fullmatch(named) and named not in hub_ids:
            hub_ids.append(named)
        return cls(model_id, directory, tuple(hub_ids), cached.commit if cached else None)

    @property
    def repo_id(self) -> str:
        """What a client is best told to ask for."""
        return self.hub_ids[0] if self.hub_ids else self.model_id

    @property
    def key(self) -> str:
        """The model key of `repo_id`, for people to copy."""
        return f"{_PREFIX}:{json.dumps({'repo_id': self.repo_id, 'revision': None, 'task': TASK})}"

    def nearness(self, repo_id: str) -> int | None:
        """How well a key's ``repo_id`` names this model, 0 best; None: not at all.

        A path is one of the client's machine, so its last part counts; so does that of a hub id
        where the checkpoint does not say where it is from.
        """
        if repo_id == self.model_id:
            return 0
        if repo_id in (str(self.directory), str(self.directory.resolve())):
            return 1
        if repo_id.casefold() in [known.casefold() for known in self.hub_ids]:
            return 2
        is_path = PurePosixPath(repo_id).is_absolute() or PureWindowsPath(repo_id).is_absolute()
        last = re.split(r"[/\\]", repo_id.rstrip("/\\"))[-1]
        if (is_path or not self.hub_ids) and last in (self.model_id, self.directory.resolve().name):
            return 3
        return None


def find(key: ModelKey, served: Sequence[ServedModel]) -> ServedModel:
    """The model that a key means. Raises ModelNotFound, BadRequest when several could be meant."""
    near: Mapping[ModelId, int] = {
        model.model_id: nearness
        for model in served
        if (nearness := model.nearness(key.repo_id)) is not None
    }
    meant = [m for m in served if near.get(m.model_id, -1) == min(near.values(), default=0)]
    if not meant:
        known = ", ".join(sorted(model.repo_id for model in served)) or "none"
        raise ModelNotFound(
            f"This node has no model {key.repo_id[:200]!r}; it has: {known}.",
            fix="Ask for one of these, or bring it up with `hearthnet deploy`.",
            param="model_key",
        )
    if len(meant) > 1:
        ids = ", ".join(model.model_id for model in meant)
        raise _refused(f"{key.repo_id!r} could be any of {ids}.", "Name one of these.")
    if key.revision not in (None, meant[0].snapshot):
        raise _refused(
            f"{meant[0].model_id} is not served at revision {key.revision[:64]!r}.",
            "Leave revision out.",
        )
    return meant[0]


def _refused(message: str, fix: str) -> BadRequest:
    return BadRequest(message, fix=fix, param="model_key")
