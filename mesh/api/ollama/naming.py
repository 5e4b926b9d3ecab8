"""Answers in other forms than Ollama's, of models by the names that Ollama's clients know.

Some find out over Ollama's API what there is, and then ask it over OpenAI's, as both are at one
address: the names that `/api/tags` lists are good there, too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from mesh.api.ollama.models import Catalogue
from mesh.api.services import Generations
from mesh.types import GenerationRequest, StreamFrame


@dataclass(frozen=True, slots=True)
class ByAnyName:
    """Generations, by what a client may call their model."""

    generations: Generations
    catalogue: Catalogue

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """As `Generations.generate`."""
        return self.generations.generate(self._named(request))

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """As `Generations.lens`."""
        return await self.generations.lens(self._named(request), top)

    async def count(self, request: GenerationRequest) -> int:
        """As `Generations.count`."""
        return await self.generations.count(self._named(request))

    async def load(self, request: GenerationRequest) -> None:
        """As `Generations.load`."""
        await self.generations.load(self._named(request))

    def _named(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, model=self.catalogue.named(request.model))
