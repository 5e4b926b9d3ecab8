"""`/status`, `/env`, `/whoami`, `/ping`, `/connected`: what nnsight's helpers ask of a server."""

from __future__ import annotations

import asyncio
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Caller, caller_of
from mesh.api.ndif.model_keys import TASK, ServedModel
from mesh.api.services import LOADING, RESTING, DeploymentControl, MeshView
from mesh.interventions.jobs.types import JobRunner
from mesh.types import ModelId


class Deployments:
    """The models that this node takes jobs for, as its overview lists them."""

    def __init__(
        self, view: MeshView, runner: JobRunner, control: DeploymentControl | None = None
    ) -> None:
        self._view = view
        self._runner = runner
        self._control = control
        self._read: dict[ModelId, ServedModel] = {}

    async def served(self) -> list[ServedModel]:
        """The models whose files are here, with the names that clients know them by."""
        found = []
        for row in [row for row in self._view.models() if row["local"]]:
            model_id, directory = row["id"], Path(row["directory"])
            known = self._read.get(model_id)
            if known is None or known.directory != directory:
                known = await asyncio.to_thread(ServedModel.read, model_id, directory)
                self._read[model_id] = known
            found.append(known)
        return found

    async def wake(self, model_id: ModelId, caller: Caller) -> bool:
        """Have a model up that rests. Raises Forbidden when the caller's key may not."""
        if self._control is None:
            return False
        return await self._control.wake(model_id, may_wake=caller.may_wake)

    async def listing(self) -> dict[str, dict[str, Any]]:
        """``/status``'s deployments by model id."""
        served = await self.served()
        rows = {row["id"]: row for row in self._view.models()}
        return {
            model.model_id: {
                "model_key": model.key,
                "repo_id": model.repo_id,
                "revision": "main",
                "task": TASK,
                "trust_remote_code": False,
                "deployment_level": rows[model.model_id]["level"],
                **self._state(rows[model.model_id]),
            }
            for model in served
            if model.model_id in rows
        }

    def _state(self, row: dict[str, Any]) -> dict[str, Any]:
        why = self._runner.why_not(row["id"])
        if why is not None:
            return {"application_state": "UNHEALTHY", "reason": why}
        if row.get("reason") == RESTING:
            return {"application_state": "NOT_STARTED", "reason": "The model is at rest."}
        if row["missing"]:
            missing = f"No node serves layers {', '.join(row['missing'])}."
            return {"application_state": "NOT_STARTED", "reason": missing}
        if row["runnable"]:
            return {"application_state": "RUNNING"}
        if row["reason"] == LOADING:
            return {"application_state": "DEPLOYING", "reason": "The model is loading."}
        return {"application_state": "UNHEALTHY", "reason": row["reason"]}


def routes(deployments: Deployments) -> list[Route]:
    """The endpoints' routes."""
    packages: dict[str, str] = {}

    async def status(_request: Request) -> Response:
        """The deployments, as nnsight clients read them: ``{"deployments": {name: {...}}}``."""
        return JSONResponse({"deployments": await deployments.listing()})

    async def env(_request: Request) -> Response:
        """Python's version and that of its packages: ``{"python_version", "packages"}``."""
        if not packages:
            packages.update(await asyncio.to_thread(_packages))
        return JSONResponse({"python_version": sys.version, "packages": packages})

    async def whoami(request: Request) -> Response:
        """Whom the key belongs to: ``{"email", "tags": its scopes}``."""
        caller = caller_of(request)
        tags = [*sorted(caller.scopes), *(["trusted"] if caller.trusted else [])]
        email = None if caller.is_keyless else caller.principal.name
        return JSONResponse({"email": email, "tags": tags})

    async def ping(_request: Request) -> Response:
        """`pong`."""
        return JSONResponse("pong")

    async def connected(_request: Request) -> Response:
        """`true`."""
        return JSONResponse(True)

    endpoints = (status, env, whoami, ping, connected)
    return [Route(f"/{endpoint.__name__}", endpoint) for endpoint in endpoints]


def _packages() -> dict[str, str]:
    """Versions by import name, as nnsight lists its own. Blocks."""
    names: dict[str, list[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            names.setdefault(owner, []).append(module)
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"])
        found |= dict.fromkeys(names.get(name, [name]), distribution.version)
    return found
