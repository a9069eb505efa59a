"""Openings of small children's stories, put together from lists of words, for training drafts of the built-in target.

    python benchmarks/story_prompts.py FILE [--num 3072]

Every prompt is different, and none is a prompt of builtin:stories, which is what the drafts are measured on.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import specdec_cli

HELD_OUT = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
WORDS = {
    "girl": "Lily|Mia|Anna|Sara|Lucy|Emma|Zoe|Ella|Nina|Sue|Amy|Jane|Molly|Rosie|Clara|Daisy|Kim|Tara|Maya|Eva",
    "boy": "Tim|Tom|Ben|Max|Sam|Jack|Leo|Bob|Billy|Timmy|Joe|Oscar|Theo|Ruben|Finn|Noah|Peter|Mark|Luke|Otto",
    "animal": "cat|dog|bird|rabbit|fox|bear|frog|duck|mouse|turtle|squirrel|puppy|kitten|hen|owl|"
    "pig|bunny|lion|elephant|monkey|hedgehog|horse|cow|goat|sheep|bee|butterfly|fish|snail|"
    "deer",
    "kind": "little|small|big|old|happy|sad|shy|brave|lazy|kind|clever|funny|gentle|curious|tiny|"
    "hungry|tired|lonely|silly|quiet",
    "colour": "red|blue|green|yellow|brown|white|black|pink|purple|orange|golden",
    "thing": "ball|kite|hat|boat|book|car|doll|drum|box|cup|shoe|bike|balloon|toy|truck|teddy|"
    "umbrella|blanket|coat|key|stone|flower|cookie|apple|puzzle|rope|ladder|map|whistle",
    "place": "park|garden|forest|house|school|kitchen|river|beach|farm|village|yard|zoo|market|"
    "library|lake|field|big city|small town|castle|cave|barn|playground|shop|attic|mountain",
    "weather": "sunny|rainy|windy|cold|warm|snowy|cloudy|hot|foggy|stormy",
    "who": "mom|dad|grandma|grandpa|sister|brother|friend|teacher|aunt|uncle|neighbour|baby brother",
    "deed": "play outside|run fast|draw pictures|sing songs|help people|eat cookies|climb trees|"
    "read books|swim|jump high|bake a cake|look at the stars|build a tower|ride a bike|dance|"
    "pick flowers|find a friend|go on an adventure|share toys|catch a fish|plant a tree|"
    "hide and seek|clean the room",
    "feeling": "sad|happy|scared|angry|excited|surprised|proud|worried|lonely|sorry",
    "day": "morning|afternoon|evening|day|night",
}
"""Words by their place in a pattern, separated by bars."""

PATTERNS = [
    "Once upon a time, there was a {kind} {animal}",
    "Once upon a time, there was a {kind} girl named {girl}. She loved to {deed}.",
    "Once upon a time, there was a {kind} boy named {boy}. He liked to {deed}.",
    "Once upon a time, a {kind} {animal} lived in a {colour} house near the {place}.",
    "Once upon a time, {girl} and {boy} went to the {place}.",
    "One day, {girl} found a {colour} {thing} in the {place}.",
    "One day, {boy} saw a {kind} {animal} in the {place}. He",
    "One {weather} {day}, {girl} and her {who} went to the {place}.",
    "One {weather} {day}, {boy} lost his {colour} {thing}. He was very {feeling}.",
    "It was a {weather} {day}. The {kind} {animal} wanted to {deed}, but",
    "There was a {kind} {animal} named {boy} who lived in the {place}.",
    "{girl} had a {colour} {thing}. It was her favorite toy.",
    "{boy} wanted to {deed}, but his {who} said,",
    "{girl} was {feeling} because her {thing} was broken. Her {who}",
    '"{boy}, come here!" said his {who}. {boy} ran to the {place} and',
    '"Can we {deed}?" asked {girl}. Her {who} smiled and said,',
    '"I am {feeling}," said the {kind} {animal}. The {animal2} said,',
    "The {kind} {animal} and the {kind2} {animal2} were friends. Every {day} they",
    "The {animal} looked at the {colour} {thing} and",
    "{boy} and his {who} made a {thing} in the {place}. Then",
    "Long ago, in a {kind} {place}, there lived a {animal} who could not {deed}.",
    "Every {day}, {girl} went to the {place} to {deed}. But today",
    "In the {place}, a {animal} was looking for a {thing}. Suddenly,",
    "{girl} did not want to share her {thing}. {boy} felt {feeling} and",
    "{boy} was afraid of the {animal}. His {who} held his hand and",
    "The {who} gave {girl} a {colour} {thing} for her birthday. She",
    "On a {weather} {day}, the {animal} could not find the way to the {place}.",
    "A {kind} {animal} wanted to be friends with a {animal2}, but",
    "{girl} and her {animal} played in the {place}. They saw a {colour} {thing} and",
    "The {kind} {thing} stood alone in the {place}. All day it",
]


def prompts(num: int, seed: int = 0) -> list[str]:
    """So many different prompts; one in three ends somewhere in its middle."""
    rng = random.Random(seed)
    refused = {json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()}
    found: dict[str, None] = {}
    while len(found) < num:
        choices = {name: text.split("|") for name, text in WORDS.items()}
        words = {name: rng.choice(its) for name, its in choices.items()}
        words |= {"kind2": rng.choice(choices["kind"]), "animal2": rng.choice(choices["animal"])}
        prompt = rng.choice(PATTERNS).format(**words)
        if rng.random() < 1 / 3:
            parts = prompt.split()
            prompt = " ".join(parts[: rng.randrange(3, max(4, len(parts)))])
        if prompt not in refused:
            found[prompt] = None
    return list(found)


def main() -> None:
    """Write a file of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--num", type=int, default=3072)
    options = parser.parse_args()
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(options.num)]
    options.file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
