"""Plots that happen at home: noises, cakes, fires, fears.

Pure data; `plots_outdoors` explains the slots.
"""

from __future__ import annotations

from tools.builtin_model.corpus.plot import Plot

NOISE = Plot(
    name="noise",
    slots={
        "sound|cause": (
            "tap, tap, tap|a branch at the window",
            "scratch, scratch|a kitten at the door",
            "drip, drip, drip|a hole in the roof",
            "bump, bump|an apple that rolled on the floor",
            "hoo, hoo|a baby owl in the chimney",
            "ring, ring|a small bell in the wind",
        ),
        "where": (
            "in the attic",
            "behind the door",
            "above the stairs",
            "in the kitchen",
            "outside the window",
        ),
    },
    beats=(
        (
            "One night, {h} woke up. There was a sound {where}: {sound}.",
            "It was late, and {name} was in bed. {sound_cap}, went something {where}.",
        ),
        (
            "{He} pulled the blanket over {his} head, but the sound did not stop.",
            '{His} heart was beating fast. "Is it a ghost?" {he} thought.',
        ),
        (
            "{He} went to wake up {his} friend {fname}, {farticle} who was staying for the night.",
            '"{fname}, did you hear that?" whispered {name}. {ftitle} was awake, too.',
        ),
        (
            '"Let us look together," said {fname}. "Together it is only half as scary."',
            '"I am a little afraid," said {f}. "So am I," said {name}. "Let us go together."',
        ),
        (
            "They took a lamp and went on tiptoe, step by step.",
            "With a lamp in {his} hand, {name} went first.",
        ),
        (
            "And what did they find? It was only {cause}!",
            "{name} held up the lamp. There was no ghost. It was {cause}.",
        ),
        (
            "They laughed until their bellies hurt.",
            '"So that was our ghost," said {fname}, and they laughed.',
        ),
        (
            "Then they drank warm milk and went back to bed.",
            "After that, {h} was never afraid of the dark again.",
            "Soon the house was quiet, and everybody slept until morning.",
        ),
    ),
    summary=(
        "{name} heard a strange sound {where}. {He} and {fname} went to look, and it was only "
        "{cause}.",
    ),
    questions=(
        ("What made the sound?", "It was only {cause}."),
        ("Where did the sound come from?", "The sound came from somewhere {where}."),
        ("Was it a ghost?", "No, it was not a ghost. It was {cause}."),
        ("Who went with {name}?", "{ftitle} went with {name}."),
    ),
    wish=("who hears a strange sound at night", "and a strange noise"),
)

CAKE = Plot(
    name="cake",
    slots={
        "dish|missing": (
            "an apple cake|flour",
            "a big pot of soup|carrots",
            "a plum pie|sugar",
            "a plate of pancakes|milk",
            "a nut bread|honey",
            "a berry tart|eggs",
        ),
        "reason": (
            "a party",
            "the birthday of {his} mother",
            "the first day of winter",
            "the village feast",
            "the wedding of {his} aunt",
        ),
        "mishap": (
            "It was too salty",
            "It was black on one side",
            "It fell on the floor",
            "It was as hard as a stone",
        ),
    },
    beats=(
        (
            "One day, {h} wanted to make {dish} for {reason}.",
            "It was the day before {reason}, and {h} decided to make {dish}.",
        ),
        (
            "But when {he} opened the cupboard, there was no {missing}.",
            "{He} had everything except {missing}.",
        ),
        (
            'So {he} went to {fname}, {farticle}, and asked for some. "Take all you need," said '
            "{fname}.",
            '"I have plenty of {missing}," said {his} neighbor {ftitle}. "May I help?"',
        ),
        (
            "They mixed and stirred, and there was a great mess in the kitchen.",
            "{name} read the recipe aloud, and {fname} did the stirring.",
        ),
        (
            "The first try went wrong. {mishap}.",
            '"Oh no," said {name}. {mishap}. "Let us try again," said {f}.',
            "",
        ),
        (
            "The second time, everything went well, and the whole house smelled wonderful.",
            "When it was ready, it looked better than in the book.",
        ),
        (
            "Everybody wanted a piece, and nothing was left.",
            "{name} gave the biggest piece to {fname}.",
        ),
        (
            '"It tastes best when you share it," said {name}.',
            '"Next time we will make two," said {fname} with {fis} mouth full.',
        ),
    ),
    summary=(
        "{name} wanted to make {dish} for {reason}, but there was no {missing}. {fname} had some, "
        "and they made it together.",
    ),
    questions=(
        ("What did {name} want to make?", "{name} wanted to make {dish}."),
        ("What was missing?", "There was no {missing}."),
        ("Who had some?", "{ftitle} had some {missing}."),
    ),
    wish=("who wants to make {dish}", "and {dish}"),
)

FIRE = Plot(
    name="fire",
    slots={
        "log": (
            "a dry log",
            "an old chair",
            "a bundle of twigs",
            "a basket of pine cones",
            "three pieces of wood",
        ),
        "food": ("potatoes", "chestnuts", "apples", "sausages", "bread on sticks"),
    },
    beats=(
        (
            "It was the coldest night of the winter, and {h} had hardly any wood.",
            "One winter night, the snow was deep, and the fire of {name} was almost out.",
        ),
        (
            '"One log will not last until morning," {he} thought.',
            "{He} put {his} last log on the fire and looked into the flames.",
        ),
        (
            "Then there was a knock. Outside stood {fname}, {farticle}, with {log}.",
            'Somebody knocked at the door. "My fire went out," said {ftitle}. "But I have {log}."',
        ),
        (
            '"Come in," said {name}. "Your wood and my wood will make one good fire."',
            '"Alone we would both be cold," said {name}. "Let us share one fire."',
        ),
        (
            "Soon more neighbors came, and each of them brought a little wood.",
            "A second knock, and a third one: before long the house was full of friends.",
        ),
        (
            "They sat around the hearth and roasted {food}.",
            "The room grew warm. They ate {food} and told stories.",
        ),
        (
            "When one of them got sleepy, another one watched the fire.",
            "All night long, somebody was always awake to look after the flames.",
        ),
        (
            "In the morning the fire was still burning, and nobody had been cold.",
            "And since that winter, they have met at one hearth whenever it snows.",
        ),
    ),
    summary=(
        "It was a cold night. {fname} came to {name} with {log}, more neighbors came, and together "
        "they kept one fire burning until morning.",
    ),
    questions=(
        ("What did {fname} bring?", "{fname} brought {log}."),
        ("What did they eat?", "They ate {food}."),
        ("Did the fire go out?", "No, the fire was still burning in the morning."),
    ),
    wish=("and a cold winter night", "who keeps a fire burning", "and a warm hearth"),
)

FEAR = Plot(
    name="fear",
    slots={
        "fear|step|end": (
            "deep water|put one foot into the pond|swam right across the pond",
            "the dark|sat in the dark for one minute|slept without a lamp",
            "high places|climbed up one step of the ladder|sat on the roof and looked at the stars",
            "speaking to a crowd|said one word in front of the mirror|told a whole story on stage",
            "the big dog on the corner|waved at the dog from far away|played ball with the dog",
        ),
        "n": ("three", "four", "five", "seven"),
    },
    beats=(
        (
            "There was one thing that {h} did not tell anyone: {he} was afraid of {fear}.",
            "Everybody knew that {name} was afraid of {fear}.",
        ),
        (
            "When the others went ahead, {he} always stayed behind.",
            '"I will never be brave," {he} said.',
        ),
        (
            'One day {his} friend {fname}, {farticle}, sat down next to {him}. "I was afraid, '
            'too," {fe} said.',
            '"You do not have to do it all at once," said {ftitle}. "Only a little bit every day."',
        ),
        (
            "So on the first day, {name} {step}. That was all.",
            'The next morning, {h} {step}. "That was not so bad," {he} said.',
        ),
        (
            "On the second day {he} did a little more, and {f} was always there.",
            "Every day {he} did a little more.",
        ),
        (
            'Once {he} wanted to give up. "Tomorrow is another day," said {fname}.',
            "",
        ),
        (
            "After {n} days, {name} {end}.",
            "And after {n} days everyone saw how {name} {end}.",
        ),
        (
            '"You see?" said {fname}. "Being brave means being afraid and doing it anyway."',
            '"I did it!" cried {name}, and {fname} cheered the loudest.',
        ),
    ),
    summary=(
        "{name} was afraid of {fear}. With the help of {fname}, {he} did a little more every day, "
        "until {he} was not afraid any more.",
    ),
    questions=(
        ("What was {name} afraid of?", "{name} was afraid of {fear}."),
        ("Who helped {name}?", "{ftitle} helped {name}."),
        ("How long did it take?", "It took {n} days."),
    ),
    wish=("who is afraid of {fear}", "who learns to be brave"),
)

INDOOR_PLOTS = (NOISE, CAKE, FIRE, FEAR)
