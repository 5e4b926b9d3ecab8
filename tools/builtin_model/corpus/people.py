"""Names of people and places, known ones and ones made up on the spot.

A made-up name is met too seldom to be learned by heart: a model that is to say it again has to
copy it from the chat. Knows nothing of what is said about anybody.
"""

from __future__ import annotations

from random import Random

WOMEN = (
    "Ada", "Agnes", "Aisha", "Alice", "Amara", "Amelia", "Amy", "Andrea", "Angela", "Anita",
    "Anja", "Astrid", "Ava", "Bea", "Bella", "Berta", "Beth", "Birgit", "Carla", "Carmen",
    "Cecilia", "Celia", "Chiara", "Chloe", "Claire", "Cora", "Dana", "Daria", "Diana", "Dora",
    "Edith", "Elena", "Elif", "Elise", "Eliza", "Elsa", "Emily", "Erika", "Esther", "Eva",
    "Fatima", "Fiona", "Flora", "Freya", "Frieda", "Gina", "Gloria", "Grace", "Hana", "Hannah",
    "Heidi", "Helen", "Helga", "Hilda", "Ida", "Ines", "Inga", "Irene", "Iris", "Isabel", "Jana",
    "Jane", "Jenny", "Jessica", "Joan", "Johanna", "Judith", "Julia", "Karen", "Katja", "Kim",
    "Kira", "Lara", "Laura", "Lea", "Leila", "Lena", "Lina", "Lisa", "Lotte", "Lucia", "Lucy",
    "Lydia", "Magda", "Margot", "Maria", "Marta", "Mary", "Mathilda", "Mei", "Mila", "Mina",
    "Mira", "Molly", "Nadia", "Naomi", "Nina", "Noor", "Olga", "Paula", "Petra", "Priya", "Rachel",
    "Rita", "Rosie", "Ruth", "Sally", "Sara", "Selma", "Sonja", "Stella", "Sue", "Susan", "Tara",
    "Tess", "Thea", "Ulla", "Ursula", "Vera", "Violet", "Wanda", "Yara", "Yuki", "Zara",
)  # fmt: skip
MEN = (
    "Adam", "Ahmed", "Albert", "Alex", "Ali", "Amir", "Andrew", "Aron", "Arthur", "August", "Axel",
    "Bernd", "Bill", "Bob", "Boris", "Carl", "Carlos", "Cem", "Charlie", "Chris", "Conrad", "Dan",
    "Daniel", "David", "Diego", "Dirk", "Edgar", "Eli", "Elias", "Erik", "Ernst", "Fabian", "Frank",
    "Fred", "Fritz", "Georg", "George", "Gustav", "Hans", "Harry", "Hassan", "Henry", "Ian", "Igor",
    "Ivan", "Jakob", "James", "Jan", "Jim", "Joe", "Johan", "John", "Jon", "Juan", "Julian", "Kai",
    "Karl", "Ken", "Kenji", "Klaus", "Kurt", "Lars", "Lasse", "Levi", "Liam", "Linus", "Louis",
    "Luca", "Lukas", "Magnus", "Marco", "Mark", "Martin", "Mateo", "Matt", "Mike", "Mohamed",
    "Moritz", "Nick", "Nico", "Niels", "Nils", "Olaf", "Oliver", "Omar", "Oscar", "Pablo", "Pedro",
    "Peter", "Phil", "Piotr", "Rafael", "Raj", "Ralf", "Ravi", "Ray", "Robert", "Robin", "Roman",
    "Rudi", "Samuel", "Sergio", "Simon", "Stefan", "Steve", "Sven", "Tariq", "Ted", "Tim", "Tobias",
    "Uwe", "Victor", "Viktor", "Walter", "Will", "Xaver", "Yusuf", "Zeno",
)  # fmt: skip

_ONSETS = (
    "b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p",
    "qu", "r", "s", "sh", "st", "t", "th", "tr", "v", "w", "y", "z", "",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ie", "oo", "y")
_CODAS = ("", "", "", "l", "n", "r", "s", "th", "m", "x", "ck", "nd", "t")


def invent(rng: Random) -> str:
    """A name that nobody has, such as 'Brolith'."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    text = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
    text += rng.choice(_CODAS)
    return (text if len(text) > 2 else text + "na").capitalize()


def anybody(rng: Random) -> str:
    """A name: as often made up as known."""
    return invent(rng) if rng.random() < 0.5 else rng.choice(WOMEN + MEN)
