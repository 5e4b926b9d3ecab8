"""Plots that need a whole village: a race, a new neighbor, a broken machine.

Pure data; `plots_outdoors` explains the slots.
"""

from __future__ import annotations

from tools.builtin_model.corpus.plot import Plot

RACE = Plot(
    name="race",
    slots={
        "event|goal": (
            "a running race|the old oak tree",
            "a boat race|the wooden bridge",
            "a sled race|the bottom of the hill",
            "a swimming race|the far side of the pond",
        ),
        "slip": (
            "stopped to talk to the crowd",
            "took a nap in the shade",
            "went the wrong way",
            "laughed so much that {fe} fell over",
            "stopped to eat a pear",
        ),
    },
    beats=(
        (
            "Every year there was {event} to {goal}.",
            "One day, the whole village met for {event} to {goal}.",
        ),
        (
            '"I am the fastest," said {ftitle}. "Nobody can beat me."',
            "{fname}, {farticle}, was very sure that {fe} would win.",
        ),
        (
            "{H} was not fast at all, but {he} wanted to try.",
            '"I will take part," said {name}, and everybody was surprised.',
        ),
        (
            '"Ready, steady, go!" called the old goat, and they were off.',
            "A bell rang, and the race began.",
        ),
        (
            "{F} was far ahead in no time. But then {fe} {slip}.",
            "Soon {fname} was so far in front that {fe} {slip}.",
        ),
        (
            "{H} did not stop. {He} went on, slowly and steadily.",
            '"One bit after another," said {name} to {himself}, and kept going.',
        ),
        (
            "When {f} looked up again, {name} was already at {goal}.",
            "And so it was {name} who came to {goal} first. Everybody cheered.",
        ),
        (
            '"Well done," said {fname}, and {fe} meant it.',
            '"Next year I will not stop," said {fname}, and they both laughed.',
            "{name} shared the prize with {fname}, for it was a very big cake.",
        ),
    ),
    summary=(
        "There was {event} to {goal}. {fname} was faster, but {fe} {slip}, and so {name} won.",
    ),
    questions=(
        ("Who won?", "{name} won the race."),
        ("Why did {fname} not win?", "Because {fe} {slip}."),
        ("Where did the race end?", "The race ended at {goal}."),
    ),
    wish=("who takes part in a race", "and a race"),
)

NEIGHBOR = Plot(
    name="neighbor",
    slots={
        "gift": (
            "a loaf of bread",
            "a pot of flowers",
            "a drawing of the village",
            "three fresh eggs",
            "a bag of nuts",
            "a candle",
        ),
        "skill": (
            "play the flute",
            "fix broken clocks",
            "tell wonderful stories",
            "paint with all colors",
            "fold birds out of paper",
            "find the North Star",
        ),
    },
    beats=(
        (
            "One day, somebody new moved into the house next door. It was {fname}, {farticle}.",
            "One autumn, a stranger came to the village, {farticle} named {fname}.",
        ),
        (
            "{Fe} was very quiet and never came out to play.",
            "Nobody knew {fim}, and nobody talked to {fim}.",
        ),
        (
            '"I think that {fe} is lonely," thought {h}.',
            '"Perhaps {fe} is only shy," said {name}.',
        ),
        (
            "So {he} took {gift} and knocked at the door.",
            "The next day, {name} rang the bell. In {his} hand {he} held {gift}.",
        ),
        (
            "For a while, nothing happened. Then the door opened a little.",
            '"Who is there?" asked a soft voice. "It is only me, {name} from next door."',
        ),
        (
            '"Is that for me?" asked {fname}. "Nobody has ever brought me anything."',
            "{fname} looked at the present and began to smile.",
        ),
        (
            "They talked until evening, and it turned out that {fname} could {skill}.",
            "Soon they were talking about everything. {F} could {skill}, and {fe} showed it to "
            "{him}.",
        ),
        (
            "By the end of the week, {fname} knew the whole village by name.",
            "From then on, the door next door was always open.",
            '"I am glad you knocked," said {fname}.',
        ),
    ),
    summary=("{fname} was new and lonely. {name} brought {fim} {gift}, and they became friends.",),
    questions=(
        ("What did {name} bring?", "{name} brought {gift}."),
        ("Who was new?", "{ftitle} was new."),
        ("What could {fname} do?", "{fname} could {skill}."),
    ),
    wish=("who gets a new neighbor", "who makes a new friend"),
)

LAMP = Plot(
    name="lamp",
    slots={
        "machine|use": (
            "the big clock|nobody knew what time it was",
            "the lighthouse|the boats could not find the harbor",
            "the water wheel|there was no flour for bread",
            "the lamp in the square|the streets were dark",
            "the bell of the tower|nobody woke up in time",
            "the old radio|there was no music in the evening",
        ),
        "p1|p2|p3": (
            "a wheel|a screw|a drop of oil",
            "a spring|a piece of wire|a little hammer",
            "a glass|a wick|a match",
            "a nail|a rope|a plank",
        ),
    },
    beats=(
        (
            "One evening, {machine} stopped working, and {use}.",
            "In the village, {machine} was broken, and {use}.",
        ),
        (
            'Everyone shook their heads. "It is too big for one of us," they said.',
            '"Who can repair it?" asked the people. Nobody could do it alone.',
        ),
        (
            '{H} looked at it for a long time. "Perhaps not one of us," {he} said. "But all of '
            'us together can."',
            '"Each of us has a small part," said {name}. "Let us put the parts together."',
        ),
        (
            "{He} brought {p1}. {ftitle} brought {p2}. The old baker brought {p3}.",
            "{fname}, {farticle}, had {p2}. The teacher had {p3}. And {name} had {p1}.",
        ),
        (
            "They worked all night, each one doing a small piece.",
            "One held the lamp, one turned the screws, and one told jokes.",
        ),
        (
            "Then {fname} fell asleep, and for a moment everything stopped. But somebody "
            "else took over, and they went on.",
            "",
            '"I am tired," said {f}. "Then rest," said {name}, "and somebody else will take '
            'your place."',
        ),
        (
            "In the morning, {machine} was working again.",
            "When the sun came up, {machine} worked better than before.",
        ),
        (
            '"No one is strong enough alone," said {name}. "Together we are."',
            "And the people said that it was the best night they had ever had.",
        ),
    ),
    summary=(
        "In the village, {machine} was broken. {name}, {fname} and the others each brought a small "
        "part, and together they repaired it.",
    ),
    questions=(
        ("What was broken?", "It was {machine} that was broken."),
        ("What did {name} bring?", "{name} brought {p1}."),
        ("What did {fname} bring?", "{fname} brought {p2}."),
        ("What is the moral?", "Nobody is strong enough alone, but together they are."),
    ),
    wish=("who repairs something", "and a broken machine"),
)

VILLAGE_PLOTS = (RACE, NEIGHBOR, LAMP)
