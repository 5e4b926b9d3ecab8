"""What an answer must look like, as OpenAI's `response_format` and `text.format` have it, and as
vLLM's `structured_outputs` does."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.bodies import Strict, only, require_plain
from mesh.api.openai.sampling import Refused
from mesh.api.openai.tools import FunctionName
from mesh.models.schema_bounds import MAX_EXPRESSION


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


_MAX_CHOICES = 1024
_MAX_LETTERS = 1 << 16
Letters = Annotated[str, Field(min_length=1, max_length=_MAX_LETTERS)]


class StructuredOutputs(Strict):
    """What vLLM's clients send: an answer is JSON that a schema describes, any JSON object, one of
    some texts, or what a regular expression matches, which is written as in Rust."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    choice: Annotated[list[Letters], Field(min_length=1, max_length=_MAX_CHOICES)] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_EXPRESSION)] | None = None
    # vLLM's, not here
    grammar: Refused = None
    structural_tag: Refused = None
    whitespace_pattern: Refused = None
    disable_fallback: Annotated[None, only(False)] = None
    disable_any_whitespace: Annotated[None, only(False)] = None
    disable_additional_properties: Annotated[None, only(False)] = None

    _plain_enough = field_validator("json_")(require_plain)

    @model_validator(mode="after")
    def _says_one(self) -> Self:
        ways = (self.json_, self.json_object, self.choice, self.regex)
        if sum(each is not None for each in ways) != 1:
            raise ValueError("send one of json, json_object, choice and regex")
        if sum(map(len, self.choice or [])) > _MAX_LETTERS:
            raise ValueError(f"the texts of choice have more than {_MAX_LETTERS} letters")
        return self

    def asked(self) -> dict[str, Any]:
        """What a generation is told of it."""
        if self.choice is not None:
            texts = "|".join(map(re.escape, self.choice))
            return {"pattern": texts, "bound_by": "structured_outputs.choice"}
        if self.regex is not None:
            return {"pattern": self.regex, "bound_by": "structured_outputs.regex"}
        schema = {"type": "object"} if self.json_ is None else self.json_
        return {"schema": schema, "bound_by": "structured_outputs.json"}
