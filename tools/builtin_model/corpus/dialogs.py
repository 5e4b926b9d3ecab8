"""Conversations: single questions, follow-ups, what was told and is remembered, stories.

Composes what the other generators draw. Knows the order of turns and nothing of special tokens.
"""

from __future__ import annotations

from random import Random

from tools.builtin_model.corpus import arithmetic, memory, smalltalk
from tools.builtin_model.corpus.cast import ANIMALS, with_article
from tools.builtin_model.corpus.commands import COMMAND_TOPICS
from tools.builtin_model.corpus.document import Message, exchange
from tools.builtin_model.corpus.facts_mesh import MESH_TOPICS
from tools.builtin_model.corpus.facts_use import USE_TOPICS
from tools.builtin_model.corpus.stories import Story, tell
from tools.builtin_model.corpus.topics import Topic, answer, vary

_SYSTEM = (
    "You are a helpful assistant.", "You are the built-in model of hearthnet.",
    "Be brief and friendly.", "You are a kind storyteller.", "Answer in English.",
    "You are a friendly assistant that answers questions about hearthnet.",
)  # fmt: skip
_MORE = (
    "Tell me more.", "Can you say more about that?", "And?", "Go on.", "More, please.",
    "Please explain that.", "Why?", "What else?", "Really?", "Can you go into detail?",
)  # fmt: skip
_NO_MORE = (
    "That is all I know about it. `hearthnet --help` and the documentation know more.",
    "I have told you all I know about that.",
)
_ASK_STORY = (
    "Tell me a story {about}.", "Can you tell me a story {about}?", "Please tell me a story "
    "{about}.", "I would like a story {about}.", "Write a story {about}.", "A story {about}, "
    "please.", "Make up a story {about}.", "Write a short story {about}.",
)  # fmt: skip
_ANY_STORY = (
    "Tell me a story.", "Can you tell me a story?", "Another story, please.", "One more story!",
    "Tell me another one.", "I want to hear a story.", "Tell me a bedtime story.", "story please",
)  # fmt: skip
_CONTINUE = (
    "Continue this story: {start}", "Please continue: {start}", "Go on with this story: {start}",
    "How does this story go on? {start}", "Continue the story.\n{start}", "Finish this: {start}",
)  # fmt: skip
_SHORTER = (
    "Can you say that in one sentence?", "What happened in the story?", "Make it shorter.",
    "Sum up the story.", "Can you sum it up?",
)  # fmt: skip
_LIKED = ("I liked that.", "That was a nice story.", "Nice!", "What a lovely story!", "I like it.")
_GLAD = ("I am glad that you liked it! Shall I tell you another one?", "Thank you! I like it, too.")


def converse(rng: Random, target_turns: int) -> list[Message]:
    """A conversation of about that many exchanges."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append(Message("system", rng.choice(_SYSTEM)))
    if target_turns > 1 and rng.random() < 0.25:
        messages += _say(rng, smalltalk.TALK_TOPICS[0])
    while _exchanges(messages) < target_turns:
        messages += rng.choices(*_MAKERS)[0](rng)
    if target_turns > 1 and rng.random() < 0.3:
        messages += _say(rng, rng.choice(smalltalk.TALK_TOPICS[9:11]))
    return messages


def drill_sums(rng: Random) -> list[Message]:
    """A few sums in a row."""
    messages: list[Message] = []
    for _ in range(rng.randint(1, 4)):
        messages += _sums(rng)
    return messages


def drill_memory(rng: Random) -> list[Message]:
    """Things told and asked for, or words to be said again."""
    if rng.random() < 0.33:
        return [message for _ in range(rng.randint(1, 5)) for message in _echo(rng)]
    return _told(rng)


def continue_story(rng: Random) -> list[Message]:
    """The user begins a story, the assistant ends it."""
    story = tell(rng)
    sentences = story.text.replace("\n", " ").split(". ")
    cut = rng.randint(1, max(1, min(4, len(sentences) - 2)))
    start = ". ".join(sentences[:cut]) + "."
    rest = ". ".join(sentences[cut:])
    request = rng.choice(_CONTINUE).format(start=start)
    return [*exchange(request, rest), *_about(rng, story)]


def _exchanges(messages: list[Message]) -> int:
    return sum(m.role == "user" for m in messages)


def _topic_exchange(rng: Random, topic: Topic) -> list[Message]:
    asked = vary(rng, rng.choice(topic.questions))
    messages = [*exchange(asked, answer(rng, topic))]
    if topic.more and rng.random() < 0.45:
        messages += exchange(rng.choice(_MORE), rng.choice(topic.more))
        if rng.random() < 0.25:
            messages += exchange(rng.choice(_MORE), rng.choice(_NO_MORE))
    return messages


def _mesh(rng: Random) -> list[Message]:
    # The question everybody asks first comes up more often than its share.
    topic = MESH_TOPICS[0] if rng.random() < 0.12 else rng.choice(MESH_TOPICS)
    return _topic_exchange(rng, topic)


def _use(rng: Random) -> list[Message]:
    return _topic_exchange(rng, rng.choice(USE_TOPICS))


def _command(rng: Random) -> list[Message]:
    return _topic_exchange(rng, rng.choice(COMMAND_TOPICS))


def _talk(rng: Random) -> list[Message]:
    if rng.random() < 0.15:
        return [*exchange(*smalltalk.beyond(rng))]
    return _say(rng, rng.choice(smalltalk.TALK_TOPICS))


def _say(rng: Random, topic: Topic) -> list[Message]:
    messages = [*exchange(rng.choice(topic.questions), answer(rng, topic))]
    if topic.more and rng.random() < 0.3:
        messages += exchange(rng.choice(_MORE), rng.choice(topic.more))
    return messages


def _sums(rng: Random) -> list[Message]:
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        asked, result = arithmetic.question(rng)
        messages += exchange(vary(rng, asked), result)
    return messages


def _facts(rng: Random) -> list[Message]:
    asked, result = smalltalk.fact(rng)
    return [*exchange(vary(rng, asked), result)]


def _echo(rng: Random) -> list[Message]:
    return [*exchange(*memory.echo(rng))]


def _told(rng: Random) -> list[Message]:
    """Something told, something else in between, and then asked for."""
    told = [memory.name(rng)] if rng.random() < 0.75 else []
    told += memory.details(rng, rng.choice((0, 0, 0, 1, 2)) if told else rng.choice((1, 2)))
    rng.shuffle(told)
    messages: list[Message] = []
    # Now and then one thing is asked for that was not told.
    unknown = told.pop() if rng.random() < 0.2 else None
    for one in told:
        messages += exchange(*one.telling)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4))):
        messages += rng.choice((_talk, _sums, _mesh, _command, _facts, _echo))(rng)
    asked = [one.asking for one in told] + ([unknown.unknown] if unknown else [])
    rng.shuffle(asked)
    for pair in asked:
        messages += exchange(*pair)
    return messages


def _story(rng: Random) -> list[Message]:
    story = tell(rng)
    return [*exchange(_request(rng, story), story.text), *_about(rng, story)]


def _request(rng: Random, story: Story) -> str:
    hero = story.cast.hero
    if rng.random() < 0.3:
        return rng.choice(_ANY_STORY)
    about = f"about {with_article(hero.kind)}"
    roll = rng.random()
    if roll < 0.35:
        about += f" named {hero.name}"
    elif roll < 0.5 and hero.kind in ANIMALS:
        about += f" and {with_article(story.cast.friend.kind)}"
    if rng.random() < 0.35:
        about += f" {story.wish}"
    return vary(rng, rng.choice(_ASK_STORY).format(about=about))


def _about(rng: Random, story: Story) -> list[Message]:
    messages: list[Message] = []
    asked = rng.sample(story.questions, rng.choice((0, 0, 1, 2, 3)))
    for question, result in asked:
        messages += exchange(question, result)
    if rng.random() < 0.2:
        messages += exchange(rng.choice(_SHORTER), story.summary)
    if rng.random() < 0.2:
        messages += exchange(rng.choice(_LIKED), rng.choice(_GLAD))
    return messages


# What chats are made of, and how often each.
_MAKERS = (
    (_mesh, _command, _use, _talk, _sums, _facts, _story, _told, _echo),
    (5, 7, 3, 3, 5, 1, 1, 4, 1),
)
