"""What the built-in model can do: sums, a name that it was told, and the commands that exist.

The questions here are no part of the text it learned from: wordings, names and goals of their own,
and sums that the corpus holds out. Shares instead of single answers, because a model of this size
is right as a rule and not always.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import pytest
import typer

from mesh.cli.main import app
from mesh.models.builtin import checkpoint_dir
from tools.builtin_model.corpus import training_documents
from tools.builtin_model.corpus.arithmetic import ADDING, is_held_out_sum, question
from tools.builtin_model.corpus.cast import BOYS, GIRLS
from tools.builtin_model.corpus.commands import COMMANDS
from tools.builtin_model.corpus.facts_mesh import MESH_TOPICS
from tools.builtin_model.corpus.facts_use import USE_TOPICS
from tools.builtin_model.corpus.memory import NAME_UNKNOWN
from tools.builtin_model.corpus.people import MEN, WOMEN

NEW_SUMS = (
    "Could you add up {a} and {b}?",
    "If I add {b} to {a}, what do I get?",
    "Please tell me what {a} plus {b} is.",
    "How many are {a} and {b}?",
    "I need the sum of {a} and {b}.",
    "{a} plus {b} makes what?",
)
TELLING = ("My name is {x}.", "Hi, I'm {x}.", "I am {x}.")
ASKING = ("What is my name?", "Do you remember my name?", "Who am I?")
# None of these is in the text. Pieces of the first are frequent there, pieces of the others rare.
COMMON_NAMES = (
    "Kevin", "Sandra", "Brian", "Melissa", "Jason", "Nicole", "Gary", "Deborah", "Ryan",
    "Stephanie", "Justin", "Sharon", "Brandon", "Cynthia", "Gregory", "Angelika", "Raymond",
    "Monika", "Patrick", "Sabine", "Dennis", "Brenda", "Jerry", "Pamela", "Tyler", "Catherine",
    "Aaron", "Janet", "Jose", "Virginia",
)  # fmt: skip
RARE_NAMES = (
    "Kerstin", "Barnaby", "Thandiwe", "Ludovic", "Ulrika", "Wolfram", "Saoirse", "Dmitri",
    "Jocelyn", "Ignatius", "Philippa", "Rasmus", "Ottilie", "Quentin", "Mirabel",
)  # fmt: skip
BETWEEN = ("What is 2 plus 3?", "What is a shard?", "Hello!", "How do I start hearthnet?")
NEW_GOALS = {
    "up": "get hearthnet going",
    "down": "stop the node now",
    "pause": "pause this machine",
    "resume": "end a pause",
    "status": "see the state of all machines",
    "chat": "talk with the model",
    "run": "ask just one question",
    "top": "watch everything live",
    "peers": "see all the other nodes",
    "models": "see which model can answer",
    "pull": "download the weights of a model",
    "list": "list downloaded models",
    "show": "see details of one model",
    "rm": "delete a model from the disk",
    "deploy": "deploy a large model",
    "scale": "change the number of copies of a model",
    "evict": "unload a large model",
    "harvest": "harvest activations of many prompts",
    "queue": "see the waiting jobs",
    "kill": "kill a running job",
    "log": "read the signed log",
    "invite": "invite another machine",
    "join": "join a hearth with a code",
    "members": "list all members",
    "keys": "create an API key",
    "steer": "publish an edit for steering",
    "config": "see all settings",
    "doctor": "find out what the problem is",
    "restart": "restart this node",
    "logs": "see the lines that the daemon prints",
    "service": "have hearthnet start by itself",
    "info": "see my version",
    "bench": "measure how fast a model is",
    "demo": "see the demo",
}


class Chats:
    """Chats with the shipped model, many at a time, greedily."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = checkpoint_dir()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def answer(self, questions: Sequence[str]) -> list[str]:
        """The answer to each, every one in a chat of its own."""
        return [answers[0] for answers in self.converse([(question,) for question in questions])]

    def converse(self, chats: Sequence[Sequence[str]]) -> list[list[str]]:
        """What is answered in each chat, question after question."""
        histories: list[list[dict[str, str]]] = [[] for _ in chats]
        for turn in range(max(map(len, chats))):
            asked = [at for at, chat in enumerate(chats) if turn < len(chat)]
            for at in asked:
                histories[at].append({"role": "user", "content": chats[at][turn]})
            replies = self._reply([histories[at] for at in asked])
            for at, reply in zip(asked, replies, strict=True):
                histories[at].append({"role": "assistant", "content": reply})
        return [[m["content"] for m in h if m["role"] == "assistant"] for h in histories]

    def _reply(self, histories: Sequence[list[dict[str, str]]]) -> list[str]:
        import torch

        prompts = [
            self._tokenizer.apply_chat_template(h, add_generation_prompt=True, tokenize=False)
            for h in histories
        ]
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            ids = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=90,
                do_sample=False,
            )
        new = ids[:, inputs["input_ids"].shape[1] :]
        return list(self._tokenizer.batch_decode(new, skip_special_tokens=True))


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats()


def sums(wordings: Sequence[str], count: int, *, held_out: bool) -> list[tuple[str, int]]:
    """Questions for sums below twenty, and what is right."""
    rng = Random(11)
    found: list[tuple[str, int]] = []
    while len(found) < count:
        total = rng.randint(1, 19)
        a = rng.randint(0, total)
        asked = rng.choice(wordings).format(a=a, b=total - a)
        if not held_out or is_held_out_sum(asked):
            found.append((asked, total))
    return found


@pytest.mark.parametrize(
    ("wordings", "held_out"), [(ADDING, True), (NEW_SUMS, False)], ids=["known", "new"]
)
def test_sums_below_twenty_are_right_as_a_rule(
    chats: Chats, wordings: Sequence[str], held_out: bool
) -> None:
    asked = sums(wordings, 80, held_out=held_out)
    answers = chats.answer([text for text, _ in asked])
    wrong = [
        (question, answer)
        for (question, total), answer in zip(asked, answers, strict=True)
        if not re.search(rf"\bis {total}\b", answer)
    ]
    assert len(wrong) <= 0.1 * len(asked), wrong


@pytest.mark.parametrize(
    ("names", "share"), [(COMMON_NAMES, 0.9), (RARE_NAMES * 2, 0.6)], ids=["common", "rare"]
)
def test_a_name_that_was_told_is_remembered(
    chats: Chats, names: Sequence[str], share: float
) -> None:
    rng = Random(12)
    dialogs = [
        (rng.choice(TELLING).format(x=name), *rng.sample(BETWEEN, at % 4), rng.choice(ASKING))
        for at, name in enumerate(names)
    ]
    answers = [replies[-1] for replies in chats.converse(dialogs)]
    wrong = [
        (dialog, answer)
        for dialog, answer, name in zip(dialogs, answers, names, strict=True)
        if name not in answer
    ]
    assert len(wrong) <= (1 - share) * len(dialogs) + 1e-9, wrong


def test_a_name_that_was_not_told_is_not_made_up(chats: Chats) -> None:
    dialogs = [(*BETWEEN[:at], asked) for at in range(4) for asked in ASKING]
    answers = [replies[-1] for replies in chats.converse(dialogs)]
    assert answers.count(NAME_UNKNOWN) >= 0.9 * len(dialogs), answers


def test_knows_the_command_for_a_goal(chats: Chats) -> None:
    assert set(NEW_GOALS) == {command.verb for command in COMMANDS}
    asked = [
        (verb, question.format(goal=goal, verb=verb))
        for verb, goal in NEW_GOALS.items()
        for question in ("Is there a way to {goal}?", "What is the {verb} command good for?")
    ]
    answers = chats.answer([question for _, question in asked])
    wrong = [
        (question, answer)
        for (verb, question), answer in zip(asked, answers, strict=True)
        if f"`hearthnet {verb}" not in answer
    ]
    assert len(wrong) <= 0.1 * len(asked), wrong


def topics() -> Iterator[str]:
    """All that the corpus says about hearthnet."""
    for topic in (*MESH_TOPICS, *USE_TOPICS, *(command.topic for command in COMMANDS)):
        yield from (*topic.questions, *topic.answers, *topic.more)


def command_line() -> tuple[set[str], set[str]]:
    """All commands of the program, such as 'members revoke', and all options."""
    commands: set[str] = set()
    options: set[str] = {"--help"}

    def walk(path: str, command: Any) -> None:
        commands.add(path)
        options.update(name for each in command.params for name in each.opts)
        for name, child in getattr(command, "commands", {}).items():
            walk(f"{path} {name}".strip(), child)

    walk("", typer.main.get_command(app))
    return commands, options


def test_the_corpus_speaks_only_of_commands_and_options_that_exist() -> None:
    commands, options = command_line()
    text = "\n".join(topics())
    told = re.findall(r"`hearthnet((?: [a-z]+)*)", text)
    assert {name.strip() for name in told} <= commands
    assert set(re.findall(r"(?<!\S)`?(--[a-z-]+)", text)) <= options


def test_the_corpus_speaks_of_every_command() -> None:
    verbs = {command.split()[0] for command in command_line()[0] if command}
    assert verbs <= {command.verb for command in COMMANDS}
    for command in COMMANDS:
        assert f"`hearthnet {command.verb}" in command.answer


def test_what_is_asked_here_was_never_trained_on() -> None:
    seen = "\n".join(document.text for document in islice(training_documents(1), 4000)).lower()
    words = set(re.findall(r"[a-z]+", seen))
    for name in COMMON_NAMES + RARE_NAMES:
        assert name not in WOMEN + MEN + GIRLS + BOYS
        assert name.lower() not in words
    for verb, goal in NEW_GOALS.items():
        assert goal not in next(c.goals for c in COMMANDS if c.verb == verb)
        assert f" {goal}" not in seen, goal
    assert not set(NEW_SUMS) & set(ADDING)
    rng = Random(13)
    assert not any(is_held_out_sum(question(rng)[0]) for _ in range(4000))
