"""What a chat template is told of whether and how hard a model is to think, and of what it thought.

Each family of templates has its own names for that; who asks need not know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates ask whether to think: the first those of Qwen 3, GLM 4.5 and SmolLM 3, the
second those of DeepSeek 3.1 and Granite 3."""
_EFFORT = "reasoning_effort"
"""What gpt-oss's asks how hard to."""
_NO_EFFORT = "no_think"
"""The level of Hunyuan 3's that is none. It has no other switch, and without a level it is that."""
_KEEPS = "preserve_thinking"
"""What those of Qwen 3.6, Laguna and LFM2.5 ask about earlier turns."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether a model is to think before it answers (None leaves it to the template, as one that
    has no switch for it does anyway), how hard (empty does), and whether it is shown what it
    thought in earlier turns (None does)."""

    wanted: bool | None = None
    effort: str = ""
    keeps: bool | None = None

    def told_to(self, template: str) -> dict[str, Any]:
        """What this template is handed for it."""
        told: dict[str, Any] = {}
        if self.wanted is not None:
            told = dict.fromkeys(_SWITCHES, self.wanted)
            if f"'{_NO_EFFORT}'" in template:
                told[_EFFORT] = "high" if self.wanted else _NO_EFFORT
        if self.effort:
            told[_EFFORT] = self.effort
        if self.keeps is not None:
            told[_KEEPS] = self.keeps
        return told


AS_IT_IS = Thinking()
"""All of it is left to the template."""


def takes_effort(template: str) -> bool:
    """Whether a chat template asks how hard the model is to think."""
    return _EFFORT in template
