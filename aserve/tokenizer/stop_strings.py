"""Stop strings in streamed text: cut at the first match, and show nothing that may still become one."""

from collections import deque
from collections.abc import Sequence


class StopStringFilter:
    """Lets text through up to the first stop string, one pass over the characters however many stops there are.

    The match that is complete first wins, the longest one if several end at the same character; so the result
    does not depend on how the text is cut into pushes.
    """

    __slots__ = ("_automaton", "_first_chars", "_held", "_state", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self._first_chars = tuple({stop[0] for stop in stops})
        self._state = 0
        self._held = ""  # the longest end of the text so far that begins a stop string
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that may be shown now, the stop string that matched or None). After a match nothing is shown."""
        if self._automaton is None:
            return text, None
        if self.matched is not None:
            return "", self.matched
        if not self._held:
            for char in self._first_chars:
                if char in text:
                    break
            else:
                return text, None
        return self._scan(self._automaton, text)

    def flush(self) -> str:
        """Return the held text, at an end that is not a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _scan(self, automaton: "_Automaton", text: str) -> tuple[str, str | None]:
        buffer = self._held + text
        state = self._state
        for end, char in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, char)
            if (stop := automaton.stops[state]) is not None:
                self.matched = stop
                self._held = ""
                return buffer[: end - len(stop)], stop
        self._state = state
        cut = len(buffer) - automaton.depths[state]
        self._held = buffer[cut:]
        return buffer[:cut], None


class _Automaton:
    """Aho-Corasick: a state is the longest end of the text that begins some stop string.

    A. Aho, M. Corasick, "Efficient string matching", 1975. ``stops[state]`` is the longest stop string that the
    text ends with in that state.
    """

    __slots__ = ("_fallbacks", "_next", "depths", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self.depths = [0]
        self.stops: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallbacks.append(0)
                self.depths.append(depth)
                self.stops.append(None)
            state = following
        self.stops[state] = stop

    def _link(self) -> None:
        """Set each state's fallback, the state of the longest proper suffix, in breadth-first order."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                fallback = self._fallbacks[following] = self.step(self._fallbacks[state], char)
                if self.stops[following] is None:
                    self.stops[following] = self.stops[fallback]
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """Return the state after ``char``; falls back at most as often as earlier steps went deeper."""
        while (following := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._fallbacks[state]
        return following
