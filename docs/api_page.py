"""docs/reference/api.md: every path of the HTTP API, from routes, their docstrings and bodies."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

from pydantic import BaseModel
from starlette.routing import Route, WebSocketRoute

from mesh.api import services
from mesh.api.anthropic import elsewhere as not_of_anthropic
from mesh.api.app import create_app
from mesh.api.auth import is_open, needed_of
from mesh.api.bodies import Strict
from mesh.api.faults import RefusedRoute
from mesh.api.ndif.routes import JobsApi
from mesh.api.ollama import elsewhere as not_of_ollama
from mesh.api.openai import elsewhere as not_of_openai
from mesh.api.services import ApiSettings, Services
from mesh.identity.api_keys import ApiKeys, Scope
from mesh.transfers.pulls import Pulls

HEAD = """# HTTP API

At `http://127.0.0.1:8420` unless `api_host` and `api_port` say otherwise; beyond loopback with TLS
and keys ([how](../how-to/reach-the-api.md)). A key goes into `Authorization: Bearer hn_...` or `X-Api-Key`.
A slash too many in a path, or at its end, changes nothing. What a path needs:

- *Chat*, *Interventions*, *Admin*: a key with that scope (`hearthnet keys create --scope`). On
  loopback chat and interventions need no key, unless the node was told otherwise. The owner of the
  node may do everything; the command line finds the owner's key by itself.
- *Any caller*: any key, on loopback none.
- *Everybody*: no key wherever the API is bound.

Bodies are JSON objects, strictly: an unknown field that is not null, a wrong type or a number out
of bounds is refused with its name. Errors are `{"error": {"message", "type", "param", "code", "fix"}}`
([codes](errors.md)), below `/api/` `{"error": message, "code"}`, below `/v1/messages`
`{"type": "error", "error": {"type", "message", "param", "code"}}`; every message ends with the fix. In a
stream that has begun the last event is one. Every answer has
`X-Request-Id`, taken over from the request where it is 1 to 128 of `A-Z a-z 0-9 . _ : / + = @ -`,
else made; the daemon's log has it on its lines about the request. A stream that was asked for with
`resumable` also has `X-Stream-Id`.
"""

REFUSED = """### Paths of other servers

Refused with `not_supported` (400), which says what to use instead: {paths}, and what is below them.
"""

FAMILIES = (
    ("OpenAI's", "/v1/"),
    ("Anthropic's", "anthropic"),
    ("Ollama's", "/api/"),
    ("The mesh", "/mesh/v1/"),
    ("Watching and the page", ""),
    ("nnsight's", "ndif"),
)
"""Title, and how paths of it begin; or the package of `mesh.api` that they come from."""

REFUSED_OF = {
    "OpenAI's": [*not_of_openai.STORED],
    "Anthropic's": [*not_of_anthropic.INSTEAD],
    "Ollama's": [*not_of_ollama.INSTEAD],
}

_OWNERS = {**vars(services), "Pulls": Pulls}
_REFERENCE = re.compile(r"(?:Answers as|Each as in) `(\w+)\.(\w+)`")


class _Anything:
    """Stands for the parts of a daemon, of which routes only keep hold."""

    def __getattr__(self, name: str) -> Any:
        return self


def app_routes() -> list[Route | WebSocketRoute]:
    """The routes of a daemon that has everything."""
    part = cast("Any", _Anything())
    everything = Services(*(part for _ in fields(Services)))
    app = create_app(part, part, ApiSettings(), part, ApiKeys(), JobsApi(part, part), everything)
    return [route for route in app.routes if isinstance(route, Route | WebSocketRoute)]


def calls(route: Route | WebSocketRoute) -> list[str]:
    """``GET /path`` and kin, as the page has them."""
    path = re.sub(r":\w+}", "}", route.path)
    if isinstance(route, WebSocketRoute):
        return [f"WS {path}"]
    return [f"{method} {path}" for method in sorted((route.methods or set()) - {"HEAD"})]


def page() -> str:
    """The whole page."""
    parts, told = [HEAD], set[str]()
    nested: dict[str, type[BaseModel]] = {}
    families: dict[str, list[Route | WebSocketRoute]] = {title: [] for title, _ in FAMILIES}
    for route in app_routes():
        families[_family(route)].append(route)
    for title, routes in families.items():
        parts.append(f"## {title}\n")
        for route in routes:
            fresh = [call for call in calls(route) if call not in told]
            told.update(fresh)
            if fresh and not isinstance(route, RefusedRoute):
                parts.append("\n".join(_section(route, fresh, nested)))
        if title in REFUSED_OF:
            parts.append(REFUSED.format(paths=_names(REFUSED_OF[title])))
    parts.append("## Objects in bodies\n")
    shown = set[str]()
    while left := [name for name in nested if name not in shown]:
        for name in left:
            shown.add(name)
            said = _plain(nested[name].__doc__)
            lines = [f"### {name}\n", f"{said}\n", *_fields(nested[name], nested), ""]
            parts.append("\n".join(lines))
    return "\n".join(parts)


def _family(route: Route | WebSocketRoute) -> str:
    package = _endpoint_of(route).__module__.split(".")[2]
    if package in (begin for _, begin in FAMILIES):
        return next(title for title, begin in FAMILIES if begin == package)
    return next(title for title, begin in FAMILIES if route.path.startswith(begin))


def _section(
    route: Route | WebSocketRoute, fresh: list[str], nested: dict[str, type[BaseModel]]
) -> Iterator[str]:
    yield "### " + ", ".join(f"`{call}`" for call in fresh) + "\n"
    yield f"*{_who(route)}.* {_said(route)}\n"
    for body in bodies_of(route):
        yield f"{_plain(body.__doc__)}\n"
        yield from _fields(body, nested)
        yield ""


def _who(route: Route | WebSocketRoute) -> str:
    needed = needed_of(route)
    if needed is not None:
        return Scope(needed).value.capitalize()
    return "Everybody" if is_open(route.path) else "Any caller"


def _endpoint_of(route: Route | WebSocketRoute) -> Any:
    return route.endpoint


def _said(route: Route | WebSocketRoute) -> str:
    said = _plain(_endpoint_of(route).__doc__)
    owner = _REFERENCE.search(said)
    if owner is not None:
        answer = _plain(getattr(_OWNERS[owner[1]], owner[2]).__doc__)
        said = _REFERENCE.sub("", said).replace(" , ", ", ").replace(" .", "").strip()
        said = f"{said} {answer}"
    return said


def _plain(doc: str | None) -> str:
    said = " ".join((doc or "").replace("``", "`").split())
    return said.replace(" May raise MeshError.", "")


def bodies_of(route: Route | WebSocketRoute) -> list[type[Strict]]:
    """The models of the bodies that an endpoint reads."""
    seen = inspect.getclosurevars(_endpoint_of(route))
    named = {**seen.globals, **seen.nonlocals}.values()
    return [each for each in named if inspect.isclass(each) and issubclass(each, Strict)]


def _fields(model: type[BaseModel], nested: dict[str, type[BaseModel]]) -> Iterator[str]:
    schema = model.model_json_schema(by_alias=True)
    required = set(schema.get("required", ()))
    rows, refused, hints = [], [], []
    for name, field in schema.get("properties", {}).items():
        what = _type(field)
        if what == "any":
            hints.append(name)
        elif what == "null":
            refused.append(name)
        else:
            default = "required" if name in required else _shown(field.get("default"))
            rows.append(f"| `{name}` | {what} | {default} |")
    for each in model.model_fields.values():
        for kind in _models_in(each.annotation):
            nested.setdefault(kind.__name__, kind)
    if rows:
        yield from ["| field | type | default |", "|---|---|---|", *rows]
    if refused:
        yield "\nRefused unless null, or as it is without them: " + _names(refused) + "."
    if hints:
        yield "\nTaken, and without effect: " + _names(hints) + "."


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(default: Any) -> str:
    if default is None:
        return ""
    return f"`{json.dumps(default)}`"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for each in getattr(annotation, "__args__", ()):
        yield from _models_in(each)


def _type(field: dict[str, Any]) -> str:
    """A field's type in words, with its bounds."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field or "oneOf" in field:
        kinds = [_type(each) for each in field.get("anyOf", field.get("oneOf", ()))]
        several = [kind for kind in kinds if kind != "null"]
        return " or ".join(dict.fromkeys(several)) if several else "null"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    if kind == "array":
        kind = f"list of {_type(field['items'])}"
    return kind + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    below = field.get("exclusiveMaximum")
    said = [
        f"{words} {field[key]:g}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
        )
        if abs(field.get(key, 1 << 31)) < 1 << 31
    ]
    if below is not None and below < 1 << 31:
        said.append(f"below {below:g}")
    for kind, what in (("Length", " characters"), ("Items", "")):
        if f"max{kind}" in field:
            least = field.get(f"min{kind}", 0)
            begin = f"{least} to" if least else "at most"
            said.append(f"{begin} {field[f'max{kind}']}{what}")
    if "pattern" in field:
        said.append(f"like `{field['pattern']}`")
    return f" ({', '.join(said)})" if said else ""
