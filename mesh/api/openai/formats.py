"""What an answer must look like, as OpenAI's `response_format` and `text.format` have it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mesh.api.bodies import Strict, require_plain
from mesh.api.openai.tools import FunctionName


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema. It is always followed: `strict` changes nothing, nor do the other fields."""

    name: FunctionName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None

    _plain_enough = field_validator("schema_")(require_plain)


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class SchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


FlatFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]
"""The same in `/v1/responses`."""


def schema_of(wanted: ResponseFormat | FlatFormat | None) -> dict[str, Any] | None:
    """The JSON schema of an answer; None for any text."""
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_
    if isinstance(wanted, SchemaFormat):
        return wanted.schema_
    return {"type": "object"} if isinstance(wanted, JsonObjectFormat) else None
