"""An async client of the local daemon's HTTP API, for the CLI, the TUI and scripts.

Which HTTP library is used stays in this file. Errors that the daemon reports come back as the same
`mesh.errors` classes they were raised as.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from urllib.parse import quote, urlencode

import httpx

from mesh import codec
from mesh.codec import Fault
from mesh.config import is_loopback
from mesh.errors import (
    BadRequest,
    BadValue,
    InternalError,
    LinkLost,
    MeshError,
    NotRunning,
    UntrustedPeer,
    VersionMismatch,
    from_dict,
)
from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord, read_daemon, required_daemon

_READ_S = 60.0
"""Longer than the server's pause between keep-alive comments."""
_CONNECT_S = 5.0
_LENS_S = 900.0
_HARVEST_S = 1000.0
"""Longer than the daemon waits for a batch."""
_SIGN_S = 1000.0
"""A checkpoint that is deployed for the first time is read to its last byte."""
_DEPLOYMENTS = "/mesh/v1/deployments"
_WEIGHTS = "/mesh/v1/weights"
_START_ONE = "Start one with `hearthnet up`, or name another with --host or --state-dir."
_ENDED = "`hearthnet logs` shows what it printed last; `hearthnet up` starts it again."
_JSON = {"Content-Type": "application/json"}


class Client:
    """A connection to one daemon; use it as ``async with``.

    Every method raises NotRunning when no daemon answers, LinkLost when it goes away meanwhile,
    and otherwise the MeshError that the daemon reports.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        certificate: str | None = None,
        daemon: DaemonRecord | None = None,
    ) -> None:
        """With a `certificate` (PEM), a daemon that shows this very one is talked to, no other.
        `daemon` is what it left, where it runs on this machine.

        Without, its certificate is checked as any website's, or by the file that SSL_CERT_FILE
        names. Raises BadValue for what is no URL, and for such a file without certificates.
        """
        self.url = url.rstrip("/")
        self._daemon = daemon
        parsed = _parsed(self.url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        checked, transport = trusting_nobody(), None
        if certificate is not None:
            transport = _ToItself(certificate, daemon)
        try:
            if certificate is None and parsed.scheme == "https":
                checked = httpx.create_ssl_context()
            # Proxies of the environment must not see what stays on this machine.
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
                trust_env=certificate is None and not is_loopback(parsed.host),
                verify=checked,
                transport=transport,
            )
        except OSError as error:  # of TLS as well
            raise BadValue(
                f"SSL_CERT_FILE names no file with certificates: {error.strerror or error}.",
                fix="Save the node's certificate there once more (its `hearthnet status` says where"
                " it is), or unset SSL_CERT_FILE.",
                param="SSL_CERT_FILE",
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def status(self) -> dict[str, Any]:
        """`GET /mesh/v1/status`."""
        return await self._get("/mesh/v1/status")

    async def peers(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/peers`."""
        return await self._list("/mesh/v1/peers", "peers")

    async def models(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/models`: all models, also those that miss layers."""
        return await self._list("/mesh/v1/models", "models")

    async def jobs(self) -> dict[str, Any]:
        """`GET /mesh/v1/jobs`: the queue of nnsight clients' jobs."""
        return await self._get("/mesh/v1/jobs")

    async def kill_job(self, job_id: str) -> dict[str, Any]:
        """`POST /mesh/v1/jobs/ID/kill`: end a job now."""
        return await self._post(f"/mesh/v1/jobs/{_quoted(job_id)}/kill", {})

    async def privacy(self) -> dict[str, Any]:
        """`GET /mesh/v1/privacy`: who can see what of prompts and answers."""
        return await self._get("/mesh/v1/privacy")

    async def harvest(self, **batch: Any) -> dict[str, Any]:
        """`POST /mesh/v1/harvest`: run one batch; it may take minutes."""
        return await self._post("/mesh/v1/harvest", batch, timeout_s=_HARVEST_S)

    async def readiness(self) -> list[tuple[str, str]]:
        """What the daemon misses before it can answer, each with its code (`mesh.api.services`),
        "" from an older one; empty when ready."""
        try:
            response = await self._http.get("/readyz")
        except httpx.TransportError as error:
            raise await self._lost(error) from error
        if response.status_code not in {200, 503}:
            raise _reported(response.content)
        told = _object(response.content)
        missing: list[str] = told["missing"]
        return list(zip(told.get("codes", [""] * len(missing)), missing, strict=True))

    def chat(
        self, model: str, messages: list[dict[str, str]], **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed chat completion; `options` are further fields of the body.

        Closing the iterator cancels the generation.
        """
        body = {"model": model, "messages": messages, **options}
        return self._completion("/v1/chat/completions", body)

    def complete(
        self, model: str, prompt: str | list[int], **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed completion without a chat template; see `chat`."""
        return self._completion("/v1/completions", {"model": model, "prompt": prompt, **options})

    async def lens(self, **body: Any) -> dict[str, Any]:
        """`POST /mesh/v1/lens`: what each layer would say next; see `mesh.api.lens.LensBody`."""
        return await self._post("/mesh/v1/lens", body, timeout_s=_LENS_S)

    async def follow(self, after: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """The feed: events from `after` on, and what of the status changed, together.

        See `mesh.api.feed.DashboardFeed.follow`; ends when the daemon stops.
        """
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        stream = self._stream("GET", "/mesh/v1/events?with=status", headers=headers)
        async with aclosing(stream):
            async for data in stream:
                update = _object(data)
                if "error" in update:
                    raise _told(update["error"])
                yield update

    async def log(self, **wanted: Any) -> dict[str, Any]:
        """`GET /mesh/v1/log`: entries of the hearth's signed log, newest first."""
        given = {name: value for name, value in wanted.items() if value is not None}
        return await self._get(f"/mesh/v1/log?{urlencode(given)}")

    async def when_ready(self, model: str, **wanted: Any) -> dict[str, Any]:
        """`GET /mesh/v1/coordination?model=MODEL`: who serves it, once it is ready. Raises NotReady
        when it is not within the `wait` seconds that are wanted."""
        given = {name: value for name, value in wanted.items() if value is not None}
        return await self._get(f"/mesh/v1/coordination?{urlencode({'model': model, **given})}")

    async def job_log(self, job_id: str) -> dict[str, Any]:
        """`GET /mesh/v1/jobs/ID/log`: what a job has printed lately."""
        return await self._get(f"/mesh/v1/jobs/{_quoted(job_id)}/log")

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
        return await self._list("/mesh/v1/keys", "keys")

    async def create_key(self, name: str, scopes: list[str], **more: Any) -> dict[str, Any]:
        """`POST /mesh/v1/keys`: a new key; ``key`` of the answer is shown this once."""
        return await self._post("/mesh/v1/keys", {"name": name, "scopes": scopes, **more})

    async def revoke_key(self, key_id: str) -> dict[str, Any]:
        """`POST /mesh/v1/keys/revoke`: the key is good for nothing from now on."""
        return await self._post("/mesh/v1/keys/revoke", {"key_id": key_id})

    async def steerings(self) -> list[dict[str, Any]]:
        """`GET /mesh/v1/steering`: the hearth's published steering edits."""
        return await self._list("/mesh/v1/steering", "edits")

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
        return await self._list(_DEPLOYMENTS, "deployments")

    async def deploy(self, model: str, **order: Any) -> dict[str, Any]:
        """`POST /mesh/v1/deployments`; see `mesh.api.deployments.DeployBody` for the `order`."""
        return await self._post(_DEPLOYMENTS, {"model": model, **order}, timeout_s=_SIGN_S)

    async def plan(self, model: str, **wish: Any) -> dict[str, Any]:
        """`POST /mesh/v1/plan`: what deploying it needs and gives; see `mesh.api.plan.PlanBody`."""
        return await self._post("/mesh/v1/plan", {"model": model, **wish}, timeout_s=_SIGN_S)

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        """`PATCH /mesh/v1/deployments/MODEL`: have so many replicas."""
        path, body = f"{_DEPLOYMENTS}/{_quoted(model)}", {"replicas": replicas}
        return await self._post(path, body, timeout_s=_SIGN_S, method="PATCH")

    async def evict(self, model: str) -> list[dict[str, Any]]:
        """`DELETE /mesh/v1/deployments/MODEL`: end its deployments."""
        path = f"{_DEPLOYMENTS}/{_quoted(model)}"
        answer = await self._post(path, {}, timeout_s=_SIGN_S, method="DELETE")
        found: list[dict[str, Any]] = answer["evicted"]
        return found

    async def _completion(
        self, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        content = _encoded({**body, **options})
        stream = self._stream("POST", path, content=content, headers=_JSON)
        async with aclosing(stream):
            async for data in stream:
                if data == "[DONE]":
                    return
                chunk = _object(data)
                if "error" in chunk:
                    raise _told(chunk["error"])
                yield chunk
        raise LinkLost("The daemon ended the answer too early.", fix="See its log; try again.")

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path)
        except httpx.TransportError as error:
            raise await self._lost(error) from error
        if response.is_error:
            raise _reported(response.content)
        return _object(response.content)

    async def _list(self, path: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._get(path))[name]
        return found

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float = _READ_S,
        method: str = "POST",
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        content = _encoded(body)
        try:
            response = await self._http.request(
                method, path, content=content, headers=_JSON, timeout=timeout
            )
        except httpx.TransportError as error:
            raise await self._lost(error) from error
        if response.is_error:
            raise _reported(response.content)
        return _object(response.content)

    async def _stream(self, method: str, path: str, **options: Any) -> AsyncGenerator[str, None]:
        """The data of each server-sent event."""
        try:
            async with self._http.stream(method, path, **options) as response:
                if response.is_error:
                    raise _reported(await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        yield line.removeprefix("data: ")
        except httpx.TransportError as error:
            raise await self._lost(error) from error

    async def _lost(self, error: httpx.TransportError) -> MeshError:
        if _is_untrusted(error):
            return UntrustedPeer(
                f"The certificate that {self.url} shows is not trusted here: {error}.",
                fix="Copy the one that `hearthnet status` names there, compare its fingerprint, and"
                " name the copy in SSL_CERT_FILE.",
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            if self._daemon is not None:
                return await asyncio.to_thread(_unreachable, self.url, self._daemon)
            return not_running(f"Nothing answers at {self.url}.")
        if "without sending a response" in str(error):  # the same
            if self._daemon is not None:
                return LinkLost(
                    f"The daemon at {self.url}, process {self._daemon.pid}, ended before it had"
                    " answered.",
                    fix=_ENDED,
                )
            return LinkLost(
                f"Who listens at {self.url} hung up without an answer: the API is elsewhere, or"
                " the daemon stops.",
                fix="Name the address of the API, not that of the nodes: `hearthnet status` on that"
                " machine shows it (`--api-port` of `hearthnet up`).",
            )
        return LinkLost(
            f"The connection to the daemon at {self.url} broke: {type(error).__name__}.",
            fix="See `hearthnet status` and the daemon's log.",
        )


def locate(host: str | None, state_dir: Path, api_key: str | None) -> Client:
    """A client of the daemon at URL `host`, else of the one that runs with `state_dir`.

    Raises NotRunning when `state_dir` has no running daemon; FileRefused when it is not ours to
    look into.
    """
    paths = StatePaths(state_dir)
    if host is not None:
        record = read_daemon(paths.runtime_file)
        url = host if "://" in host else f"http://{host}"
        # The owner's key goes to the daemon that wrote it down, under the very name it gave.
        if record is not None and url.rstrip("/") == record.api_url:
            return client_of(record, api_key)
        return Client(url, api_key=api_key)
    return client_of(required_daemon(paths, _START_ONE), api_key)


def client_of(record: DaemonRecord, api_key: str | None = None) -> Client:
    """A client of the daemon that left this record, as its owner; else with `api_key`."""
    key = record.api_key or api_key
    return Client(record.api_url, api_key=key, certificate=record.certificate, daemon=record)


_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def pinned(certificate: str) -> ssl.SSLContext:
    """Accepts a server that proves to be the one with this certificate (PEM), under any name and
    at any time: one that has expired, or a clock that is wrong, makes it no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Whoever vouches for it does not matter: this one is known.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    context.load_verify_locations(cadata=certificate)
    return context


class _ToItself(httpx.AsyncHTTPTransport):
    """To the daemon with this certificate, or with what it was renewed by while that runs."""

    def __init__(self, certificate: str, daemon: DaemonRecord | None) -> None:
        self._context = pinned(certificate)
        self._daemon = daemon
        super().__init__(verify=self._context)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except httpx.ConnectError as error:
            # Nothing was sent yet: this is about whom to send it to.
            if not _is_untrusted(error) or not await asyncio.to_thread(self._knows_renewed):
                raise
        return await super().handle_async_request(request)

    def _knows_renewed(self) -> bool:
        renewed = None if self._daemon is None else self._daemon.renewed()
        if renewed is None:
            return False
        with contextlib.suppress(ssl.SSLError):
            self._context.load_verify_locations(cadata=renewed)
            return True
        return False


def _is_untrusted(error: httpx.TransportError) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)  # httpx tells it in words only


def trusting_nobody() -> ssl.SSLContext:
    """For plain HTTP: to read the whole list of authorities takes longer than a question."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def not_running(message: str) -> NotRunning:
    """The error for a daemon that is not there."""
    return NotRunning(message, fix=_START_ONE)


def _unreachable(url: str, daemon: DaemonRecord) -> NotRunning:
    if not daemon.is_alive:
        return NotRunning(f"The daemon at {url}, process {daemon.pid}, has ended.", fix=_ENDED)
    message = f"Nothing answers at {url}, though its daemon runs here, as process {daemon.pid}."
    if is_loopback(httpx.URL(url).host):
        return NotRunning(
            message,
            fix="One that is being stopped lets running answers end: wait. Else see `hearthnet"
            " logs`; `hearthnet restart` starts it anew.",
        )
    return NotRunning(
        f"{message} Has this machine other addresses than when that started?",
        fix="`hearthnet down`, then `hearthnet up --api-host 0.0.0.0`, which is at any address that"
        " it has, or --api-host with the new one.",
    )


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
        why = "there is no such port" if (parsed.port or 0) >= 1 << 16 else ""
    except (httpx.InvalidURL, UnicodeError) as error:
        why = str(error)
    if why:
        raise BadValue(
            f"{url} is no URL: {why}.", fix="Name the daemon as http://HOST:PORT.", param="host"
        )
    return parsed


def _quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="", errors="surrogateescape")


def _encoded(body: dict[str, Any]) -> bytes:
    """A request's body. Raises BadRequest for what JSON in UTF-8 cannot say."""
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"{name} is {value}.", fix="Give a finite number.", param=name)
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(
            "The request holds bytes that are not UTF-8 text.",
            fix="Convert them first, for instance with `iconv -f LATIN1 -t UTF-8`.",
        ) from None


def _object(answer: bytes | str) -> dict[str, Any]:
    try:
        said = codec.parse_json(answer, _Answer)
    except Fault:
        raise _not_a_daemon() from None
    if not isinstance(said, _Answer):
        raise _not_a_daemon()
    return said


class _Answer(dict[str, Any]):
    """A map that a daemon said, which may be of another version than who reads it."""

    def __missing__(self, key: str) -> NoReturn:
        raise VersionMismatch(
            f"The daemon does not say {key!r}: it is of another version than this `hearthnet`.",
            fix="Run `hearthnet restart` where it is older, or update hearthnet here.",
            param=key,
        )


def _reported(body: bytes) -> MeshError:
    try:
        return _told(_object(body)["error"])
    except (VersionMismatch, AttributeError):
        return _not_a_daemon()


def _told(error: dict[str, Any]) -> MeshError:
    """The error that an answer tells, whose `message` ends with the fix."""
    return from_dict({**error, "message": error["message"].removesuffix(error["fix"]).rstrip()})


def _not_a_daemon() -> InternalError:
    return InternalError("What answers there is not a hearthnet daemon.", fix="Check the address.")
