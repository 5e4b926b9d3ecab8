"""Plots that happen outside: lost things, storms, rescues, journeys, gardens.

Pure data. In a wording, {H}/{h} is the hero by name or by kind at the start or in the middle of a
sentence, {He} {he} {him} {his} {himself} the hero's pronouns, {F} {f} {Fe} {fe} {fim} {fis} the
same for the friend; {name} and {fname} are always the names.
"""

from __future__ import annotations

from tools.builtin_model.corpus.plot import Plot

LOST = Plot(
    name="lost",
    slots={
        "thing|spot": (
            "red ball|under a bush",
            "blue scarf|on a low branch",
            "little bell|in the tall grass",
            "silver key|beside the well",
            "favorite book|on the bench by the path",
            "warm hat|behind the old gate",
            "wooden boat|between the reeds",
            "small lantern|on the steps of the mill",
            "green kite|at the top of a birch tree",
            "shiny button|in a bird's nest",
        ),
        "first|second": (
            "in the kitchen|under the bed",
            "by the pond|behind the shed",
            "in the garden|near the bridge",
            "along the path|in the hay",
            "under the table|beside the fence",
        ),
    },
    beats=(
        (
            "One morning, {h} could not find {his} {thing}.",
            "One day, {h} noticed that {his} {thing} was gone.",
            "One windy afternoon, {h} lost {his} {thing}.",
        ),
        (
            "{He} felt very sad, because it was a present from {his} grandmother.",
            "{He} had played with it only the day before.",
            '"Where can it be?" {he} asked.',
            "It was the thing {he} loved most.",
        ),
        (
            "{He} looked {first}, but it was not there.",
            "First, {he} searched {first}. There was nothing.",
            "{He} looked {first} and found only a little dust.",
        ),
        (
            "Then {he} looked {second}, but it was not there either.",
            "After that, {he} searched {second}. Still nothing.",
            "",
        ),
        (
            'Just then, {his} friend {ftitle} came by. "Why are you so sad?" asked '
            '{fname}. "I lost my {thing}," said {name}.',
            '{His} friend {fname} heard {him} sigh. "Do not worry," said the {fkind}. "Two '
            'pairs of eyes see more than one."',
            '{name} met {fname}, {farticle}, and told {fim} everything. "I will help you," said '
            "{fname}.",
        ),
        (
            "Together they walked back along the way that {h} had come.",
            '"Think," said {f}. "Where were you yesterday?" {name} thought hard.',
            "They went from place to place and asked everyone they met.",
        ),
        (
            "And there it was! The {thing} was lying {spot}.",
            "At last {fname} pointed. {spot_cap}, they saw the {thing}.",
            "Suddenly {name} laughed out loud. The {thing} was {spot}!",
        ),
        (
            '{H} hugged {fname} and said, "Thank you. I could not have found it alone."',
            '"You are a good friend," said {name}, and {fname} smiled.',
            "{name} was so happy that {he} danced all the way home.",
        ),
    ),
    summary=("{name} lost {his} {thing}. {fname} helped {him} look, and they found it {spot}.",),
    questions=(
        ("What did {name} lose?", "{name} lost {his} {thing}."),
        ("Where was it?", "The {thing} was {spot}."),
        ("Where did they find it?", "They found it {spot}."),
        ("Who helped {name}?", "{ftitle} helped {name}."),
    ),
    wish=("who loses {his} {thing}", "and a lost {thing}"),
)

STORM = Plot(
    name="storm",
    slots={
        "walk": (
            "to the lake",
            "to the market",
            "up the hill",
            "through the wood",
            "across the meadow",
            "to the old mill",
        ),
        "shelter": (
            "a dry cave",
            "an empty barn",
            "a hollow tree",
            "a small hut",
            "an old stone tower",
            "a boat that was lying upside down",
        ),
        "pastime": (
            "told each other stories",
            "sang every song they knew",
            "shared a piece of bread",
            "counted the seconds between the thunder",
            "made shadow animals on the wall",
            "talked about summer",
        ),
        "after": (
            "a rainbow stood over the hills",
            "the whole valley was shining",
            "the air smelled of grass and flowers",
            "the birds began to sing again",
            "the sun came out between the clouds",
        ),
    },
    beats=(
        (
            "One afternoon, {h} was walking {walk} when the sky turned dark.",
            "One day, {h} was on the way {walk}. Big gray clouds came over the hills.",
            "On a warm day in summer, {h} set out {walk}. {He} did not see the "
            "clouds behind {him}.",
        ),
        (
            "The wind began to blow, and heavy rain started to fall.",
            "There was a flash of light, and then the thunder rolled.",
            "Soon it was raining so hard that {he} could not see the path.",
        ),
        (
            '"I must find a dry place," thought {h}.',
            "{He} ran as fast as {he} could.",
            "{name} was wet and cold, and a little afraid.",
        ),
        (
            "At last {he} found {shelter} and crept inside.",
            'Then {he} saw {shelter}. "What luck!" said {name}, and went in.',
            "Behind some trees stood {shelter}, and {h} slipped in.",
        ),
        (
            "Somebody was already there. It was {fname}, {farticle}.",
            '"Hello," said a voice in the dark. It was {ftitle}.',
            "A minute later {ftitle} came in, too, dripping with rain.",
        ),
        (
            '"There is room for two," said {fname}.',
            '"Are you afraid of the thunder?" asked {f}. "Only a little," said {h}.',
            "They sat close together to keep warm.",
        ),
        (
            "While they waited, they {pastime}.",
            "The two of them {pastime}, and the storm did not seem so bad any more.",
        ),
        (
            "When the rain stopped, {after}.",
            "After an hour the storm was over, and {after}.",
        ),
        (
            "They walked home together, and they have been friends ever since.",
            '"I am glad that it rained," said {name}. "If it had not, I would not have met you."',
            '"See you tomorrow," said {fname}. "With or without thunder!"',
        ),
    ),
    summary=(
        "{name} was caught in a storm and hid in {shelter}. There {he} met {fname}, and they "
        "became friends.",
    ),
    questions=(
        ("Where did {name} hide?", "{name} hid in {shelter}."),
        ("Who else was there?", "{ftitle} was there, too."),
        ("What did they do while they waited?", "They {pastime}."),
        ("Where was {name} going?", "{name} was going {walk}."),
    ),
    wish=("who is caught in a storm", "and a big storm", "and the rain"),
)

RESCUE = Plot(
    name="rescue",
    slots={
        "trap|tool|how": (
            "in the deep mud|a long rope|pulled with all {his} strength",
            "at the top of a tall tree|a wooden ladder|leaned it against the trunk",
            "in a hole in the ground|a strong branch|let it down into the hole",
            "on a rock in the river|an old raft|steered it across the water",
            "in a thorny bush|a pair of thick gloves|pushed the thorns aside one by one",
            "behind a fallen log|a sturdy pole|lifted the log a little",
        ),
        "reward": (
            "a basket of berries",
            "a jar of honey",
            "a big smile",
            "a warm hug",
            "a song",
            "half of {fis} lunch",
        ),
    },
    beats=(
        (
            "One day, {h} heard somebody cry for help.",
            'One evening, {h} heard a small voice. "Help! Help!" it called.',
            "One cold morning, {h} was out early when {he} heard a cry.",
        ),
        (
            "It was {fname}, {farticle}. {Fe} was stuck {trap}.",
            "{He} followed the sound and found {ftitle}, who was stuck {trap}.",
        ),
        (
            '"Hold on," said {name}. "I will get you out."',
            '"Do not be afraid," said {name}. "I will think of something."',
            '"How did you get there?" asked {name}. "I was not careful," said {fname}.',
        ),
        (
            "First {he} tried it with {his} bare hands, but it did not work.",
            "At first {he} did not know what to do.",
            "",
        ),
        (
            "Then {h} had an idea. {He} ran home and came back with {tool}.",
            "{He} looked around and saw {tool}. That was just the right thing.",
            '"I need {tool}," thought {name}, and {he} hurried to get one.',
        ),
        (
            "{He} {how}, and slowly, slowly, {fname} came free.",
            "Carefully, {he} {how}. After a while, {f} was free.",
        ),
        (
            '"You saved me!" cried {fname}, and gave {name} {reward}.',
            "{fname} was so thankful that {fe} gave {name} {reward}.",
        ),
        (
            '"Anyone would have done it," said {h}, but {he} was proud.',
            "Since that day, whenever one of them needs help, the other one comes.",
            "That night {name} slept very well.",
        ),
    ),
    summary=("{fname} was stuck {trap}. {name} came with {tool} and got {fim} out.",),
    questions=(
        ("Who was stuck?", "{ftitle} was stuck {trap}."),
        ("How did {name} help?", "{name} came with {tool} and got {fname} out."),
        ("What did {fname} give {name}?", "{fname} gave {name} {reward}."),
    ),
    wish=("who rescues a friend", "who helps somebody", "who saves a friend"),
)

JOURNEY = Plot(
    name="journey",
    slots={
        "goal|sight": (
            "the sea|The water was blue and endless, and the waves sang to them",
            "the top of the mountain|From there they could see the whole world",
            "the great waterfall|The water came down like silver",
            "the big city|There were a thousand lights and a thousand voices",
            "the island in the lake|There were white birds everywhere",
            "the place where the sun comes up|The sky turned pink, then orange, then gold",
        ),
        "trouble|fix": (
            "a wide river|They built a small raft and crossed it",
            "a steep hill|They took small steps and rested often",
            "a dark forest|They held hands and sang until they were through",
            "a path that split in two|They asked an old snail, who knew the way",
            "a high wall|One climbed on the other's shoulders",
            "thick fog|They waited until it was gone",
        ),
        "pack": (
            "some bread and cheese",
            "a bottle of water and two apples",
            "a map and a blanket",
            "six cookies in a paper bag",
            "a lamp and a warm coat",
        ),
    },
    beats=(
        (
            "All {his} life, {h} had wanted to see {goal}.",
            'One day, {h} said, "I want to see {goal}."',
            "{name} had heard many stories about {goal}, and {he} wanted to see it.",
        ),
        (
            '"That is far away," said {his} friend {ftitle}. "I will come with you."',
            "{He} asked {fname}, {farticle}, to come along, and {fname} said yes.",
        ),
        (
            "They packed {pack} and left before breakfast.",
            "Early the next morning they packed {pack} and set out.",
            "With {pack} in a bag, they began to walk.",
        ),
        (
            "The first day was easy. The sun was shining, and they talked all the way.",
            "They walked past fields and farms and waved to everybody.",
            "",
        ),
        (
            'Then they came to {trouble}. "What now?" asked {fname}. {fix}.',
            "On the second day there was {trouble}. {fix}.",
        ),
        (
            "In the evening they sat under the stars and shared their food.",
            '"My feet hurt," said {h}. "Mine, too," said {f}, and they both laughed.',
            "",
        ),
        (
            "At last they reached {goal}. {sight}.",
            "On the third day they stood there and did not say a word. {sight}.",
        ),
        (
            '"It is even better than in the stories," said {name}.',
            '"It was a long way," said {fname}. "But the way was good, too," said {name}.',
            "They stayed until it was dark, and then they began the long walk home.",
        ),
    ),
    summary=(
        "{name} wanted to see {goal}. {He} went there with {fname}, and on the way they met "
        "{trouble}, but they did not give up.",
    ),
    questions=(
        ("Where did {name} want to go?", "{name} wanted to see {goal}."),
        ("What did they take with them?", "They took {pack} with them."),
        ("What was the problem on the way?", "They came to {trouble}. {fix}."),
        ("Who went with {name}?", "{ftitle} went with {name}."),
    ),
    wish=("who wants to see {goal}", "who goes on a long journey"),
)

GARDEN = Plot(
    name="garden",
    slots={
        "seed|grown": (
            "a tiny seed|a sunflower as tall as a house",
            "a round brown seed|a fat orange pumpkin",
            "a single bean|a green plant with hundreds of beans",
            "an apple seed|a little apple tree",
            "a flat white seed|the sweetest melon of all",
            "a black seed|a blue flower that nobody had ever seen",
        ),
        "wait": ("a week", "ten days", "two weeks", "a whole month"),
    },
    beats=(
        (
            "One day in spring, {h} found {seed}.",
            "In spring, somebody gave {name} {seed}.",
            '"What is this?" asked {h}. {He} had found {seed} in {his} pocket.',
        ),
        (
            "{He} dug a hole, put it into the ground and gave it some water.",
            "{He} planted it in the best corner of the garden.",
        ),
        (
            "The next morning {he} ran outside, but there was nothing to see.",
            "{He} waited all day, but nothing happened.",
        ),
        (
            '"Perhaps it is asleep," said {fname}, {farticle} who lived next door.',
            '"You must be patient," said {his} friend {ftitle}. "Good things need time."',
        ),
        (
            "So {h} gave it water every day and waited.",
            "Every morning {name} brought water, and every evening {he} said good night to it.",
            "When {h} was ill, {f} came and watered it.",
        ),
        (
            "After {wait}, a small green tip came out of the earth.",
            "{wait_cap} went by. Then, one morning, there was something green.",
        ),
        (
            "It grew and grew, and in the end it was {grown}.",
            "All summer long it grew, until it was {grown}.",
        ),
        (
            "{name} invited everyone to look at it, and {fname} clapped.",
            '"You were right," said {name} to {fname}. "It only needed time."',
            "And in autumn {he} kept one seed for the next year.",
        ),
    ),
    summary=(
        "{name} planted {seed} and waited for {wait}. With patience and water it became {grown}.",
    ),
    questions=(
        ("What did {name} plant?", "{name} planted {seed}."),
        ("What did it become?", "It became {grown}."),
        ("How long did {name} wait?", "{name} waited for {wait}."),
    ),
    wish=("who plants a seed", "and a garden"),
)

OUTDOOR_PLOTS = (LOST, STORM, RESCUE, JOURNEY, GARDEN)
