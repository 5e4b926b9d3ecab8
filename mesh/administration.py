"""What a daemon's owner asks of it: the hearth, keys, steering edits, deployments.

The half of `mesh.client.Client` that changes something for others. Knows paths and bodies, and no
HTTP library.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import quote

READ_S = 60.0
"""Longer than the server's pause between keep-alive comments."""
_SIGN_S = 1000.0
"""A checkpoint that is deployed for the first time is read to its last byte."""
_DEPLOYMENTS = "/mesh/v1/deployments"
_WEIGHTS = "/mesh/v1/weights"


class Administration(ABC):
    """The verbs; `mesh.client.Client` says which errors all of them raise."""

    @abstractmethod
    async def _get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""

    @abstractmethod
    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float = READ_S,
        method: str = "POST",
    ) -> dict[str, Any]:
        """What is answered to a body."""

    async def weights(self) -> dict[str, Any]:
        """`GET /mesh/v1/weights`: models on disks, here and nearby, and what is under way."""
        return await self._get(_WEIGHTS)

    async def pull(self, model: str, **wanted: Any) -> str:
        """`POST /mesh/v1/weights/pull`: begin to fetch a model; the pull's name."""
        return str((await self._post(f"{_WEIGHTS}/pull", {"model": model, **wanted}))["pull"])

    async def pull_outcome(self, pull: str, wait_s: int = 0) -> dict[str, Any]:
        """`GET /mesh/v1/weights/pulls/NAME`: how it is, after it ended or a while."""
        return await self._get(f"{_WEIGHTS}/pulls/{quote(pull, safe='')}?wait={wait_s}")

    async def cancel_pull(self, pull: str) -> dict[str, Any]:
        """`POST /mesh/v1/weights/pulls/NAME/cancel`: what came is kept."""
        return await self._post(f"{_WEIGHTS}/pulls/{quote(pull, safe='')}/cancel", {})

    async def remove_model(self, model: str) -> dict[str, Any]:
        """`POST /mesh/v1/weights/remove`: delete a model that was fetched."""
        return await self._post(f"{_WEIGHTS}/remove", {"model": model})

    async def reach(self) -> dict[str, Any]:
        """`POST /mesh/v1/reach`: who can open connections to whom, tried now."""
        return await self._post("/mesh/v1/reach", {})

    async def hearth(self) -> dict[str, Any]:
        """`GET /mesh/v1/hearth`: who is in."""
        return await self._get("/mesh/v1/hearth")

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/invite`: open a pairing window."""
        return await self._post("/mesh/v1/hearth/invite", {"level": level, "ttl_s": ttl_s})

    async def invitation(self, port: int) -> dict[str, Any]:
        """`GET /mesh/v1/hearth/invitation/PORT`: what became of it; waits a while for that."""
        return await self._get(f"/mesh/v1/hearth/invitation/{port}")

    async def close_invitation(self) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/invitation/close`: the code is good for nothing from now on."""
        return await self._post("/mesh/v1/hearth/invitation/close", {})

    async def join(self, code: str, peer: str | None) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/join`: take up an invitation."""
        return await self._post("/mesh/v1/hearth/join", {"code": code, "peer": peer})

    async def change_member(self, verb: str, member: str, **more: str | None) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/VERB`: promote, demote, revoke or readmit a member."""
        return await self._post(f"/mesh/v1/hearth/{verb}", {"member": member, **more})

    async def leave_hearth(self) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/leave`: take the node out of its hearth."""
        return await self._post("/mesh/v1/hearth/leave", {})

    async def recover(self, code: str) -> dict[str, Any]:
        """`POST /mesh/v1/hearth/recover`: make the node the only anchor."""
        return await self._post("/mesh/v1/hearth/recover", {"code": code})

    async def keys(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/keys`: the API keys, without the keys themselves."""
        found: list[dict[str, Any]] = (await self._get("/mesh/v1/keys"))["keys"]
        return found

    async def create_key(self, name: str, scopes: list[str], **more: Any) -> dict[str, Any]:
        """`POST /mesh/v1/keys`: a new key; ``key`` of the answer is shown this once."""
        return await self._post("/mesh/v1/keys", {"name": name, "scopes": scopes, **more})

    async def revoke_key(self, key_id: str) -> dict[str, Any]:
        """`POST /mesh/v1/keys/revoke`: the key is good for nothing from now on."""
        return await self._post("/mesh/v1/keys/revoke", {"key_id": key_id})

    async def steerings(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/steering`: the hearth's published steering edits."""
        found: list[dict[str, Any]] = (await self._get("/mesh/v1/steering"))["edits"]
        return found

    async def publish_steering(
        self, name: str, model: str, path: str, side: str, tensors: bytes
    ) -> dict[str, Any]:
        """`POST /mesh/v1/steering/publish`; `tensors` is a safetensors file."""
        encoded = base64.b64encode(tensors).decode()
        body = {"name": name, "model": model, "path": path, "side": side, "tensors": encoded}
        return await self._post("/mesh/v1/steering/publish", body)

    async def remove_steering(self, name: str) -> dict[str, Any]:
        """`POST /mesh/v1/steering/remove`."""
        return await self._post("/mesh/v1/steering/remove", {"name": name})

    async def deployments(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/deployments`: what the hearth wishes to have loaded, and how far it is."""
        found: list[dict[str, Any]] = (await self._get(_DEPLOYMENTS))["deployments"]
        return found

    async def deploy(self, model: str, **order: Any) -> dict[str, Any]:
        """`POST /mesh/v1/deployments`; see `mesh.api.deployments.DeployBody` for the `order`."""
        return await self._post(_DEPLOYMENTS, {"model": model, **order}, timeout_s=_SIGN_S)

    async def plan(self, model: str, **wish: Any) -> dict[str, Any]:
        """`POST /mesh/v1/plan`: what deploying it needs and gives; see `mesh.api.plan.PlanBody`."""
        return await self._post("/mesh/v1/plan", {"model": model, **wish}, timeout_s=_SIGN_S)

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        """`PATCH /mesh/v1/deployments/MODEL`: have so many replicas."""
        path, body = f"{_DEPLOYMENTS}/{quoted(model)}", {"replicas": replicas}
        return await self._post(path, body, timeout_s=_SIGN_S, method="PATCH")

    async def evict(self, model: str) -> list[dict[str, Any]]:
        """`DELETE /mesh/v1/deployments/MODEL`: end its deployments."""
        path = f"{_DEPLOYMENTS}/{quoted(model)}"
        answer = await self._post(path, {}, timeout_s=_SIGN_S, method="DELETE")
        found: list[dict[str, Any]] = answer["evicted"]
        return found


def quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="", errors="surrogateescape")
