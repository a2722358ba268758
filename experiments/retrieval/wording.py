"""What prompts say, in English and Korean: the numbers, the questions, and prose that is about neither.

Plain text to be continued, in no chat template. Each sentence that holds a number has it as its one `{number}`, with a
space in front, and is told apart from the prose by nothing else.
"""

from dataclasses import dataclass
from itertools import product
from random import Random


@dataclass(frozen=True)
class Wording:
    """A language. `needle` and `question` are of one number; those that are `named`, of several; `line` of a stream.

    `parts` make a sentence of prose, one of each in turn; `adjectives` and `nouns` make names.
    """

    opening: str
    needle: str
    question: str
    named_opening: str
    named_needle: str
    named_question: str
    line: str
    line_question: str
    line_end: str
    parts: tuple[tuple[str, ...], ...]
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]

    def sentence(self, random: Random) -> str:
        """One of some ten thousand."""
        return " ".join(random.choice(part) for part in self.parts) + "."

    def names(self, count: int, random: Random) -> list[str]:
        """That many, no two alike, of as few words as there need be. Raises ValueError if there are not so many."""
        pool = list(self.nouns)
        for words in (1, 2):
            if len(pool) >= count:
                break
            pool = [" ".join(each) for each in product(*[self.adjectives] * words, self.nouns)]
        if len(pool) < count:
            raise ValueError(f"there are {len(pool):,} names and {count:,} are needed: fewer --trials or --distance")
        random.shuffle(pool)
        return pool[:count]


def _split(words: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in words.split(","))


ENGLISH = Wording(
    opening="There is an important number hidden in the text below. Remember it.\n\n",
    needle=" The pass key is {number}. Remember it.",
    question="\n\nWhat is the pass key? The pass key is",
    named_opening="There are important numbers hidden in the text below. Remember them.\n\n",
    named_needle=" The number of the {name} is {number}. Remember it.",
    named_question="\n\nWhat is the number of the {name}? The number of the {name} is",
    line="line {name}: the number is {number}\n",
    line_question="What is the number in line {name}? line {name}: the number is",
    line_end="\n",
    parts=(
        _split(
            "The baker, The old teacher, A fisherman, The gardener, My neighbour, The postman, A young painter, "
            "The librarian, The carpenter, Her cousin, The miller, A tired traveller, The shepherd, Our doctor"
        ),
        _split(
            "walked to, looked at, wrote a letter about, talked for hours about, dreamed of, came back from, drew, "
            "asked everyone about, sat quietly beside, forgot about, told a story about, waited a while at"
        ),
        _split(
            "the old bridge, the market square, the quiet harbour, the long river, the apple orchard, the empty "
            "station, the stone wall, the village school, the green hills, the little church, the narrow street"
        ),
        _split(
            "in the morning, after the rain, before dinner, on a cold day, late in the evening, when the wind turned, "
            "during the holidays, as the leaves fell, while the children played, at the end of spring, once again"
        ),
    ),
    adjectives=_split(
        "amber, brave, calm, dark, early, fair, green, happy, jolly, kind, light, misty, neat, old, proud, quick, red, "
        "shy, tall, used, vast, warm, young, plain, round, sharp, sweet, thin, white, wise"
    ),
    nouns=_split(
        "anchor, basket, candle, dragon, engine, feather, guitar, hammer, insect, jacket, kitchen, ladder, mirror, "
        "needle, office, pencil, rabbit, saddle, table, umbrella, valley, window, zebra, bottle, carpet, desert, "
        "elephant, finger, hotel, jungle, knife, lemon, nurse, ocean, pepper, rocket, silver, thunder, uncle, violin, "
        "apple, bread, castle, doctor, eagle, forest, garden, honey, island, jewel, king, lamp, mountain, novel, "
        "orange, piano, queen, river, sailor, tower, village, winter, yellow, actor, bridge, cotton, diamond, empire, "
        "flower, gold, horse, iron, judge, kettle, library, market, night, onion, parrot, quartz, ribbon, shadow, "
        "tiger, urn, velvet, wagon, artist, butter, camera, dinner, enemy, farmer, glass, heart, ice, journal, "
        "keyboard, leather, magnet, nest, oven, planet, rain, ship, ticket, uniform, volcano, whale, angel, balloon, "
        "coffee, drum, egg, fire, ghost, hat, ink, jar, lion, moon, olive, prince, rose, snow, tree, vase, wolf, "
        "bell, cloud, door, eye, fish, goat, hill, kite, lake, milk, neck, owl, pearl, road, sun, train, wheel"
    ),
)
KOREAN = Wording(
    opening="아래 글에는 중요한 숫자가 하나 숨어 있다. 기억해 두어라.\n\n",
    needle=" 암호 숫자: {number}.",
    question="\n\n암호 숫자:",
    named_opening="아래 글에는 중요한 숫자가 여럿 숨어 있다. 기억해 두어라.\n\n",
    named_needle=" {name} 숫자: {number}.",
    named_question="\n\n{name} 숫자:",
    line="{name} 숫자: {number}.\n",
    line_question="질문, {name} 숫자:",
    line_end=".\n",
    parts=(
        _split(
            "빵집 주인은, 늙은 선생님은, 어부는, 정원사는, 우체부는, 젊은 화가는, 사촌은, 목수는, 이웃집 아이는, "
            "나그네는, 양치기는, 의사는"
        ),
        _split(
            "아침에, 비가 온 뒤에, 저녁 늦게, 추운 날에, 바람이 바뀌었을 때, 봄이 끝날 무렵에, 낙엽이 질 때, "
            "방학 동안, 밥을 먹기 전에"
        ),
        _split(
            "오래된 다리를, 시장 광장을, 조용한 항구를, 긴 강을, 사과 농장을, 빈 역을, 작은 교회를, 푸른 언덕을, "
            "좁은 골목을, 마을 학교를, 돌담을"
        ),
        _split(
            "바라보았다, 떠올렸다, 그렸다, 지나갔다, 좋아했다, 찾아갔다, 한참 이야기했다, 잊어버렸다, 꿈에서 보았다"
        ),
    ),
    adjectives=_split(
        "하얀, 검은, 붉은, 푸른, 작은, 큰, 낡은, 새, 둥근, 긴, 짧은, 가벼운, 무거운, 따뜻한, 차가운, 고운"
    ),
    nouns=_split(
        "사과, 바다, 성, 은, 정원, 겨울, 산, 촛불, 다리, 숲, 기타, 망치, 부엌, 사다리, 거울, 바늘, 연필, 토끼, 책상, "
        "우산, 골짜기, 창문, 병, 사막, 손가락, 칼, 레몬, 후추, 천둥, 바이올린"
    ),
)
LANGUAGES = {"en": ENGLISH, "ko": KOREAN}
