"""The models whose files this node can ask from, as they come and go: a live view for all parts.

Who is given it sees what is held now. Changes are made by the composition root alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mesh.models.local import LocalModel
from mesh.types import ModelId


class HeldModels(Mapping[ModelId, LocalModel]):
    """By model id. Those that the configuration names are `by_hand`, and never go."""

    def __init__(self, models: Iterable[LocalModel]) -> None:
        self._models = {model.model_id: model for model in models}
        self.by_hand = frozenset(self._models)

    def __getitem__(self, model_id: ModelId) -> LocalModel:
        return self._models[model_id]

    def __iter__(self) -> Iterator[ModelId]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def put(self, model: LocalModel) -> None:
        """It is held from now on."""
        self._models[model.model_id] = model

    def drop(self, model_id: ModelId) -> None:
        """It is held no longer."""
        if model_id not in self.by_hand:
            self._models.pop(model_id, None)
