"""A stand-in for a Kubernetes API server: what it must hold a client to, over real HTTPS.

It knows one custom resource, by the definition that hearthnet ships, and ConfigMaps; it checks
tokens, the shipped role, content types, names, labels, sizes, the schema, resource versions and
preconditions as https://kubernetes.io/docs/reference/using-api/api-concepts/ has them.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import mesh.coordination
from mesh.api.tls import api_tls
from mesh.config import Config
from tests.coordination.kubernetes_client import write_kubeconfig
from tests.coordination.schema import violations

MANIFESTS = Path(mesh.coordination.__file__).parent / "manifests"
CRD = yaml.safe_load((MANIFESTS / "modelmetadata-crd.yaml").read_text("utf-8"))
ROLE = next(
    each
    for each in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text("utf-8"))
    if each["kind"] == "Role"
)
SPEC = CRD["spec"]
GROUP, PLURAL = SPEC["group"], SPEC["names"]["plural"]
VERSION = SPEC["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]["properties"]
TOKEN = "a-service-account-s-token"  # noqa: S105
MAX_BODY = 1_500_000
MAX_MAP = 1 << 20
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

Objects = dict[str, dict[str, Any]]


class Refused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class ApiServer:
    """The objects of one namespace, `requests` that came, and what is to go wrong."""

    namespace: str = "kavin"
    resources: Objects = field(default_factory=dict)
    config_maps: Objects = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    role: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(ROLE))
    has_definition: bool = True
    conflicts: int = 0
    """So many changes of a status are refused, as if somebody else had been quicker."""
    unavailable: bool = False
    page: int = 2
    """The most items of a page, whatever is asked."""
    version: int = 100
    oldest: int = 0
    """A watch from before this version is too old."""
    news: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    _stirred: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> Starlette:
        mine = f"/apis/{GROUP}/{VERSION['name']}/namespaces/{self.namespace}/{PLURAL}"
        maps = f"/api/v1/namespaces/{self.namespace}/configmaps"
        return Starlette(
            routes=[
                Route(mine, self._listed, methods=["GET", "POST"]),
                Route(mine + "/{name}", self._one, methods=["GET", "DELETE", "PUT", "PATCH"]),
                Route(mine + "/{name}/status", self._status, methods=["PUT", "PATCH"]),
                Route(maps, self._maps, methods=["GET", "POST"]),
                Route(maps + "/{name}", self._map, methods=["GET", "PUT", "DELETE", "PATCH"]),
            ],
            exception_handlers={Refused: _refusal, 404: _no_path, 405: _no_path},  # type: ignore[dict-item]
        )

    # The custom resource

    async def _listed(self, request: Request) -> Response:
        query = request.query_params
        if request.method == "POST":
            return await self._create(request)
        watching = query.get("watch") in ("true", "True")
        self._admit(request, GROUP, PLURAL, "watch" if watching else "list")
        if watching:
            self.watched.set()
            return self._watch(
                int(query.get("resourceVersion") or 0), float(query["timeoutSeconds"])
            )
        names = sorted(self.resources)
        start = int(query.get("continue") or 0)
        stop = start + min(self.page, int(query.get("limit") or self.page))
        more = {"continue": str(stop)} if stop < len(names) else {}
        return JSONResponse(
            {
                "kind": "ModelMetadataList",
                "metadata": {"resourceVersion": str(self.version), **more},
                "items": [self.resources[name] for name in names[start:stop]],
            }
        )

    async def _create(self, request: Request) -> Response:
        self._admit(request, GROUP, PLURAL, "create")
        body = await self._body(request)
        self._check_resource(body)
        name = body["metadata"]["name"]
        if name in self.resources:
            raise Refused(409, f"{name} already exists")
        body.pop("status", None)
        self._stamp(body, generation=1)
        self.resources[name] = body
        await self._tell("ADDED", body)
        return JSONResponse(body, 201)

    async def _one(self, request: Request) -> Response:
        verb = {"GET": "get", "DELETE": "delete"}.get(request.method, "update")
        self._admit(request, GROUP, PLURAL, verb)
        current = self._found(self.resources, request)
        if request.method == "GET":
            return JSONResponse(current)
        if request.method != "DELETE":
            raise Refused(405, "not of this stand-in")
        options = json.loads(await request.body() or "{}")
        wanted = (options.get("preconditions") or {}).get("resourceVersion")
        if wanted not in (None, current["metadata"]["resourceVersion"]):
            raise Refused(409, "the precondition does not hold")
        del self.resources[current["metadata"]["name"]]
        self._collect_garbage(current["metadata"]["uid"])
        await self._tell("DELETED", current)
        return JSONResponse({"kind": "Status", "status": "Success"})

    async def _status(self, request: Request) -> Response:
        self._admit(request, GROUP, f"{PLURAL}/status", "update")
        if request.method != "PUT":
            raise Refused(405, "not of this stand-in")
        current = self._found(self.resources, request)
        body = await self._body(request)
        version = body["metadata"].get("resourceVersion")
        if not version:
            raise Refused(422, "metadata.resourceVersion: must be specified for an update")
        if self.conflicts > 0:
            self.conflicts -= 1
            raise Refused(409, "the object has been modified")
        if version != current["metadata"]["resourceVersion"]:
            raise Refused(409, "the object has been modified")
        self._check_resource(body)
        current = copy.deepcopy(current)
        current["status"] = body["status"]
        self._stamp(current)
        self.resources[current["metadata"]["name"]] = current
        await self._tell("MODIFIED", current)
        return JSONResponse(current)

    def _check_resource(self, body: dict[str, Any]) -> None:
        kind = body.get("apiVersion"), body.get("kind")
        if kind != (f"{GROUP}/{VERSION['name']}", SPEC["names"]["kind"]):
            raise Refused(400, f"{kind} is not of this path")
        for part in ("spec", "status"):
            if part in body and (wrong := list(violations(body[part], SCHEMA[part], part))):
                raise Refused(422, "; ".join(wrong))
        if "spec" not in body:
            raise Refused(422, "spec: required")

    # ConfigMaps

    async def _maps(self, request: Request) -> Response:
        self._admit(request, "", "configmaps", "create" if request.method == "POST" else "list")
        body = await self._body(request)
        name = body["metadata"]["name"]
        if name in self.config_maps:
            raise Refused(409, f"{name} already exists")
        self._stamp(body)
        self.config_maps[name] = body
        return JSONResponse(body, 201)

    async def _map(self, request: Request) -> Response:
        verb = {"GET": "get", "DELETE": "delete", "PUT": "update"}.get(request.method, "patch")
        self._admit(request, "", "configmaps", verb)
        current = self._found(self.config_maps, request)
        if request.method == "GET":
            return JSONResponse(current)
        if request.method == "DELETE":
            del self.config_maps[current["metadata"]["name"]]
            return JSONResponse({"kind": "Status", "status": "Success"})
        body = await self._body(request)
        body["metadata"]["uid"] = current["metadata"]["uid"]
        self._stamp(body)
        self.config_maps[body["metadata"]["name"]] = body
        return JSONResponse(body)

    def _collect_garbage(self, owner: str) -> None:
        for name, each in list(self.config_maps.items()):
            if owner in {ref["uid"] for ref in each["metadata"].get("ownerReferences", ())}:
                del self.config_maps[name]

    # What every request goes through

    def _admit(self, request: Request, group: str, resource: str, verb: str) -> None:
        self.requests.append(f"{verb} {resource}")
        if self.unavailable:
            raise Refused(503, "the server is going down")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized")
        if not any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.role["rules"]
        ):
            raise Refused(403, f"cannot {verb} resource {resource!r} in API group {group!r}")
        if group and not self.has_definition:
            raise Refused(404, "the server could not find the requested resource")

    async def _body(self, request: Request) -> dict[str, Any]:
        if request.headers.get("content-type") != "application/json":
            raise Refused(415, f"media type {request.headers.get('content-type')}")
        raw = await request.body()
        if len(raw) > MAX_BODY:
            raise Refused(413, "etcdserver: request is too large")
        body: dict[str, Any] = json.loads(raw)
        metadata = body.setdefault("metadata", {})
        if request.path_params.get("name", metadata.get("name")) != metadata.get("name"):
            raise Refused(400, "the name of the object does not match the name on the URL")
        if _NAME.fullmatch(metadata["name"]) is None:
            raise Refused(422, f"metadata.name: {metadata['name']!r}")
        wrong = [each for each in metadata.get("labels", {}).values() if not _LABEL.fullmatch(each)]
        if wrong:
            raise Refused(422, f"metadata.labels: {wrong}")
        if any(not ref.get("uid") for ref in metadata.get("ownerReferences", ())):
            raise Refused(422, "metadata.ownerReferences.uid: must not be empty")
        if sum(map(len, body.get("data", {}).values())) > MAX_MAP:
            raise Refused(422, "[]: Too long: must have at most 1048576 bytes")
        return body

    def _found(self, objects: Objects, request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        if name not in objects:
            raise Refused(404, f"{name} not found")
        return objects[name]

    def _stamp(self, body: dict[str, Any], **more: Any) -> None:
        self.version += 1
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        born = {"uid": str(uuid4()), "creationTimestamp": now, "namespace": self.namespace}
        body["metadata"] = {
            **born,
            **more,
            **body["metadata"],
            "resourceVersion": str(self.version),
        }

    # Watches

    async def _tell(self, kind: str, body: dict[str, Any]) -> None:
        self.news.append((self.version, {"type": kind, "object": copy.deepcopy(body)}))
        async with self._stirred:
            self._stirred.notify_all()

    def _watch(self, version: int, timeout_s: float) -> Response:
        async def lines() -> AsyncIterator[str]:
            position = version
            if position < self.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                yield json.dumps({"type": "ERROR", "object": gone}) + "\n"
                return
            yield json.dumps({"type": "BOOKMARK", "object": {"metadata": {}}}) + "\n"
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        for number, event in [each for each in self.news if each[0] > position]:
                            position = number
                            yield json.dumps(event) + "\n"
                        async with self._stirred:
                            await self._stirred.wait()
            except TimeoutError:
                return

        return StreamingResponse(lines(), media_type="application/json")


async def _refusal(_request: Request, error: Refused) -> Response:
    return JSONResponse(
        {"kind": "Status", "status": "Failure", "message": str(error), "code": error.code},
        error.code,
    )


async def _no_path(request: Request, _error: Exception) -> Response:
    return JSONResponse({"kind": "Status", "message": f"404 page: {request.url.path}"}, 404)


@asynccontextmanager
async def api_server(root: Path, server: ApiServer) -> AsyncIterator[Path]:
    """Serve over TLS on loopback; the kubeconfig that leads there."""
    config = await asyncio.to_thread(Config, state_dir=root, api_host="0.0.0.0")  # noqa: S104
    tls = await asyncio.to_thread(api_tls, config, ["127.0.0.1"])
    assert tls is not None
    running = uvicorn.Server(
        uvicorn.Config(
            server.app(), host="127.0.0.1", port=server.port, log_level="error", lifespan="off"
        )
    )
    running.config.load()
    running.config.ssl = tls.context
    task = asyncio.create_task(running.serve())
    while not running.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    server.port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield await asyncio.to_thread(
            write_kubeconfig,
            root / "kubeconfig", f"https://127.0.0.1:{server.port}", tls.file, TOKEN,
        )  # fmt: skip
    finally:
        running.should_exit = running.force_exit = True
        await task
