"""`GET /api/tags`, `GET /api/ps`, `POST /api/show`: the models that can be asked, as Ollama lists
them; and what they are called.

Nothing is invented: what a node does not know of a model is empty or not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh import __version__
from mesh.api.auth import Caller, caller_of
from mesh.api.bodies import read_body
from mesh.api.ollama.schemas import ShowBody
from mesh.api.openai.models import listed
from mesh.api.services import ApiSettings, DeploymentControl, MeshView
from mesh.errors import nobody_asks
from mesh.types import ModelId

API_VERSION = "0.12.11"
"""The release of Ollama whose API is followed; clients compare it."""

_TAG = ":latest"
_NEVER = "0001-01-01T00:00:00Z"
"""A time that Ollama does not know; some clients read no list without one."""
_LOADED = frozenset({"HOT", "WARM"})
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))

Rows = dict[str, dict[str, Any]]


class Catalogue:
    """The models that a caller may ask."""

    def __init__(self, view: MeshView, deployments: DeploymentControl | None) -> None:
        self._view = view
        self._deployments = deployments

    def rows(self, caller: Caller) -> Rows:
        """By id, what is known of each, as `MeshView.models` has it, with the `state` that
        `/v1/models` gives it."""
        deployed = self._deployments.view() if self._deployments is not None else []
        known: Rows = {}
        # Of several with one id what is on this disk comes last, and so is what is told.
        held = sorted(self._view.models(), key=lambda row: bool(row["local"]))
        for row in (*deployed, *held):
            known[row.get("id") or row["model_id"]] = row
        return {
            each["id"]: {
                **each["hearthnet"],
                **known.get(each["id"], {}),
                "state": each["hearthnet"]["state"],
            }
            for each in listed(self._view, self._deployments, caller)
        }

    def named(self, name: str) -> ModelId:
        """The id that a client means by a name, as it is listed or without a tag."""
        short = name.removesuffix(_TAG)
        return ModelId(name if short in ("", name) or self._is_id(name) else short)

    def why_not(self, model: ModelId) -> str | None:
        """Why a model that this node has cannot be asked now; None where it can."""
        rows = [row for row in self._view.models() if row["id"] == model]
        if not rows or any(row["runnable"] for row in rows):
            return None
        return str(rows[0]["reason"])

    def _is_id(self, name: str) -> bool:
        deployed = self._deployments.view() if self._deployments is not None else []
        ids = [each["id"] for each in self._view.models()]
        return name in (*ids, *(each["model_id"] for each in deployed))


def routes(catalogue: Catalogue, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""

    async def tags(request: Request) -> Response:
        """The models that a chat can be asked of, as Ollama lists them: `{"models": [{"name",
        "model", "modified_at", "size", "digest": the hash of its weights, "details": {"format",
        "family", "families", "parameter_size", "quantization_level"}}]}`. A name may be asked for
        with or without `:latest`.
        """
        rows = catalogue.rows(caller_of(request))
        return JSONResponse({"models": [_listed(name, row) for name, row in rows.items()]})

    async def running(request: Request) -> Response:
        """Those of them that are in memory, with their `context_length`, and `expires_at` where a
        deployment says when it will rest.
        """
        rows = catalogue.rows(caller_of(request))
        loaded = {name: row for name, row in rows.items() if row["state"] in _LOADED}
        return JSONResponse({"models": [_loaded(name, row) for name, row in loaded.items()]})

    async def show(request: Request) -> Response:
        """What is known of a model: `{"details", "model_info": {"general.basename": its id,
        "general.architecture", "general.parameter_count", "ARCHITECTURE.context_length",
        "ARCHITECTURE.block_count"}, "capabilities", "modified_at"}`. Beside `completion` the
        capabilities are `tools` and `thinking`, once the model is up; of an embedding model it is
        `embedding` alone.
        """
        body = await read_body(request, ShowBody, settings)
        wanted, rows = catalogue.named(body.model or body.name), catalogue.rows(caller_of(request))
        if wanted not in rows:
            raise nobody_asks(wanted, rows)
        return JSONResponse(_shown(wanted, rows[wanted]))

    async def version(_request: Request) -> Response:
        """`{"version": the release of Ollama whose API this follows, "hearthnet": this program's
        own}`.
        """
        return JSONResponse({"version": API_VERSION, "hearthnet": __version__})

    return [
        Route("/api/version", version),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
    ]


def _listed(model: str, row: dict[str, Any]) -> dict[str, Any]:
    facts = row.get("checkpoint") or {}
    name = model if ":" in model else model + _TAG  # Open WebUI asks for none without a tag
    return {
        "name": name,
        "model": name,
        "modified_at": facts.get("modified_at", _NEVER),
        "size": facts.get("bytes", 0),
        "digest": row.get("weights_sha256", ""),
        "details": _details(facts),
    }


def _loaded(name: str, row: dict[str, Any]) -> dict[str, Any]:
    said = _listed(name, row)
    del said["modified_at"]
    context, rests_at = row["context"], row.get("rests_at")
    return {
        **said,
        **({} if rests_at is None else {"expires_at": rests_at}),
        **({"context_length": context} if context else {}),
    }


def _shown(name: str, row: dict[str, Any]) -> dict[str, Any]:
    facts = row.get("checkpoint") or {}
    family = facts.get("family", "")
    info = {
        "general.basename": name,
        "general.architecture": family,
        "general.parameter_count": facts.get("parameters"),
        f"{family}.context_length": row["context"] if family else None,
        f"{family}.block_count": row["total_layers"] if family else None,
    }
    return {
        "modified_at": facts.get("modified_at", _NEVER),
        "details": _details(facts),
        "model_info": {key: value for key, value in info.items() if value},
        "capabilities": _capabilities(row.get("abilities") or ()),
    }


def _capabilities(abilities: Sequence[str]) -> list[str]:
    """As Ollama has them, whose embedding models do nothing else."""
    return ["embedding"] if "embedding" in abilities else ["completion", *abilities]


def _details(facts: dict[str, Any]) -> dict[str, Any]:
    family, dtype = facts.get("family", ""), facts.get("dtype", "")
    return {
        "parent_model": "",
        "format": facts.get("format", ""),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(facts["parameters"]) if facts else "",
        "quantization_level": _DTYPES.get(dtype, dtype.upper()),
    }


def _short(count: int) -> str:
    """``4.2M`` and the like, as Ollama writes it."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
