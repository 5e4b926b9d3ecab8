"""A checkpoint's tokenizer: prompts and chats to ids, ids to text.

Reads files of the checkpoint directory only, never the network, and never runs code that came with
them. It knows nothing of weights or layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from mesh.errors import BadCheckpoint, BadRequest
from mesh.models.detokenize import IncrementalDecoder, decoder_for
from mesh.models.manifest import Manifest


class Tokenizer:
    """Text to ids and back, as the checkpoint's authors meant it."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.eos_ids = eos_ids
        """Ids that end a generation: from generation_config.json, config.json and the tokenizer."""

    @classmethod
    def load(cls, manifest: Manifest) -> Tokenizer:
        """The tokenizer in the manifest's directory; BadCheckpoint when there is none to use."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                manifest.directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a plain one is all that `tokenizers` raises
            raise BadCheckpoint(
                f"No tokenizer could be loaded from {manifest.directory}: {str(error)[:200]}.",
                fix="Download tokenizer.json and tokenizer_config.json of the checkpoint.",
            ) from error
        own = tokenizer.eos_token_id
        return cls(tokenizer, frozenset((*manifest.eos_ids, *([] if own is None else [own]))))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` follows the model's own template or the plain one."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a plain prompt, with the special tokens the model starts with."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer.

        A model without a chat template gets a plain transcript: ``role: content`` per message, an
        empty line after each, then ``assistant:``. Raises BadRequest when the template refuses the
        messages (roles that do not alternate, a role it does not know) or they lack a field.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise BadRequest(
                    f"Message {number} needs a role and a content, both text.",
                    fix="Send messages as {role, content} objects.",
                    param=f"messages[{number}]",
                )
        if not self.has_chat_template:
            return self.encode(plain_transcript(messages))
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True, tokenize=True, return_dict=False,
            )  # fmt: skip
        except TemplateError as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}.",
                fix="Start with the user (or one system message) and let roles alternate.",
                param="messages",
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens and without any tidying up."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> str:
        """One token alone, special or not, for showing beside its probability."""
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder for one generation's ids; its parts joined equal `decode` of them all."""
        return decoder_for(self._backend, self.decode)


def plain_transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """How a conversation is put to a model that has no chat template."""
    lines = [f"{message['role']}: {message['content']}\n\n" for message in messages]
    return "".join((*lines, "assistant:"))
