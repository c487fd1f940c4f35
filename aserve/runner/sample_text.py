"""Text of many kinds, which a model reads at start where something about it has to be measured."""

TEXT = """\
The harbour was quiet when the ferry came in. Marta counted the passengers twice, wrote the number into her book \
and waved to the captain, who was already turning the boat around. "You are late," she said. "The wind," he answered, \
and nothing more. By noon the fog had gone, the market was open, and everybody spoke of the storm that had taken the \
roof of the old school in the night. Nobody had been hurt. The teacher moved her class into the town hall, where the \
children drew maps of the coast and argued about which island was the largest.

# Setting up

1. Unpack the archive and change into its folder.
2. Run `make install`; it asks for a prefix, which is `/usr/local` unless you say otherwise.
3. Start the service, then look at the log: the last line should read *listening on port 4180*.

| option | default | meaning |
|---|---|---|
| `--jobs` | 4 | how many tasks run at the same time |
| `--timeout` | 30 s | after which a task is given up |

def mean(values: list[float]) -> float:
    \"\"\"Return the arithmetic mean; an empty list has none.\"\"\"
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


class Queue:
    def __init__(self, limit: int = 100) -> None:
        self._items: deque[str] = deque(maxlen=limit)

    def push(self, item: str) -> bool:
        is_full = len(self._items) == self._items.maxlen
        self._items.append(item)
        return not is_full

User: My plant loses its leaves although I water it every day. What am I doing wrong?
Assistant: Watering every day is probably the cause. Most house plants want their soil to dry a little between two \
waterings; roots that always stand in water rot, and a plant with rotten roots drops its leaves as if it were thirsty. \
Put a finger into the soil: if the upper two centimetres are dry, give water, otherwise wait. Does the pot have a hole?

The speed of light in vacuum is 299,792,458 metres per second, so light takes about 8 minutes and 20 seconds from the \
Sun to the Earth, a distance of roughly 150 million kilometres. In 1676 Ole Rømer noticed that the eclipses of a moon \
of Jupiter came too early when the Earth was near and too late when it was far away. From the difference he concluded \
that light needs time to travel, which most scholars of his day did not believe. If x is the time and d the distance, \
then v = d / x; with d = 3.0e11 m and x = 1000 s this gives 3.0e8 m/s, close to the modern value.

Im Herbst fahren die Züge nach einem neuen Plan: Zwischen Hamburg und Kiel verkehrt jede halbe Stunde ein Zug, am \
Wochenende nur stündlich. Le musée est fermé le lundi, mais le jardin reste ouvert toute la semaine et l'entrée est \
gratuite. La receta lleva dos huevos, una taza de harina y un poco de sal; se mezcla todo y se deja reposar. \
今天天气很好。我们去公园散步吧。明日は雨が降るそうです。 Завтра мы поедем к бабушке в деревню.

SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON orders.customer_id = customers.id
WHERE orders.created >= '2021-03-01' GROUP BY name HAVING COUNT(*) > 5 ORDER BY orders DESC;

{"id": 7, "title": "Evening walk", "tags": ["river", "autumn"], "rating": 4.5, "draft": false, "author": null}

The committee met on Thursday to discuss the budget. Three members asked why the costs of the library had risen by a \
fifth within two years; the treasurer explained that heating alone had become twice as expensive, and that the roof, \
which should have been repaired in 2015, could not wait any longer. After an hour of debate the proposal was accepted \
by seven votes to four. A report will be published before the end of the month. Those who want to read it earlier may \
ask the secretary for a copy.

for (size_t i = 0; i < count; ++i) {
    if (table[i].key == key) return &table[i];  /* found */
}
return NULL;
"""
