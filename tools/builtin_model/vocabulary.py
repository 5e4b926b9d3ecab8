"""Train the byte-level BPE tokenizer and write its files.

Every byte is in the vocabulary, so any text survives encoding and decoding; digits stand alone,
so that sums can be learned digit by digit. Knows nothing of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.builtin_model.corpus import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer with `size` tokens; the special ones come first, in their fixed order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The special tokens are cut out first, or pieces of them would become words of their own.
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    pieces = (piece for text in texts for piece in special.split(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def tokenizer_config(max_length: int) -> str:
    """The text of tokenizer_config.json, chat template included."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(settings, indent=2) + "\n"
