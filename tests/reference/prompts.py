"""The prompts of the greedy reference: short and long, several languages, code, conversations, shared beginnings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or the messages of a conversation."""

    name: str
    content: str | list[dict[str, str]]


MANUAL = """The lighthouse at the northern end of the island was built in 1871 and is still in use. Its lamp was
first fed with rapeseed oil, then with paraffin, and since 1938 with electricity from a cable that runs under the
strait. The keeper's handbook, revised eleven times, lists the duties of each watch. At dusk the curtains around the
lens are drawn back and folded, so that no cloth can touch the glass. The clockwork that turns the lens is wound every
four hours; the weight falls through the hollow centre of the stairs, and nobody may stand below it. The keeper writes
the direction and strength of the wind into the log, the state of the sea, the visibility in nautical miles, and the
name of every ship that answers a signal. In fog the horn sounds for three seconds in every minute. If the horn fails,
the bell on the gallery is rung by hand, five strokes and a pause, until the fog has lifted or the watch has ended.
At dawn the lamp is put out, the lens is polished with a soft leather, and the curtains are closed, because sunlight
gathered by the lens could set fire to the fields behind the station. Stores are counted on the first day of each
month: oil, wicks, chimneys, rope, flour, salted meat, coal and lamp black. A keeper who leaves the station without
permission loses a week of pay; one who falls asleep on watch loses his post.
"""

STORY = """Mara had promised to bring the letter to the mill before noon. The road was dry, the sky was clear, and the
dog ran ahead of her as if he knew the way. At the bridge she met an old man who was counting the stones in the
river.
"""

SYSTEM = {"role": "system", "content": "You are a careful assistant. Answer in complete sentences."}


def _ask(question: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": question}]


PROMPTS = [
    Prompt("one word", "Hello"),
    Prompt("one digit", "7"),
    Prompt("a newline", "\n"),
    Prompt("capital", "The capital of France is"),
    Prompt("proverb", "A bird in the hand is worth"),
    Prompt("counting", "1, 2, 3, 4, 5, 6,"),
    Prompt("alphabet", "a b c d e f g h i j"),
    Prompt("definition", "Photosynthesis is the process by which"),
    Prompt("recipe", "Recipe for pancakes\n\nIngredients:\n- 200 g flour\n- 2 eggs\n-"),
    Prompt("list", "The five largest countries by area:\n1."),
    Prompt("table", "| city | country |\n|---|---|\n| Rome | Italy |\n| Oslo |"),
    Prompt("german", "Der Hund lief durch den Wald und"),
    Prompt("french", "Il était une fois, dans un petit village,"),
    Prompt("spanish", "La ciudad más grande de España es"),
    Prompt("czech", "Příliš žluťoučký kůň úpěl"),
    Prompt("russian", "Москва является столицей"),
    Prompt("japanese", "東京は日本の"),
    Prompt("emoji", "I love pizza 🍕 and ice cream 🍦 because"),
    Prompt("python", 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'),
    Prompt("javascript", "function reverse(text) {\n  return text"),
    Prompt("sql", "SELECT name, COUNT(*) FROM orders WHERE"),
    Prompt("json", '{"name": "Ada", "born": 1815, "fields": ["mathematics",'),
    Prompt("chat capital", _ask("What is the capital of Italy?")),
    Prompt("chat rain", _ask("Why does it rain?")),
    Prompt("chat poem", _ask("Write a short poem about the sea.")),
    Prompt("chat default system", [{"role": "user", "content": "hi"}]),
    Prompt(
        "chat three turns",
        [
            *_ask("Name a colour."),
            {"role": "assistant", "content": "Blue is a colour."},
            {"role": "user", "content": "Name another one, and something that has it."},
        ],
    ),
    Prompt("story", STORY),
    Prompt("story and her words", STORY + '"Good morning," said Mara,'),
    Prompt("manual", MANUAL),
    Prompt("manual and a question", MANUAL + "\nQuestion: How often is the clockwork wound?\nAnswer:"),
    Prompt("manual and another", MANUAL + "\nQuestion: Why are the curtains closed at dawn?\nAnswer:"),
]
