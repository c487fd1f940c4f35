"""The parsers by name, and which of them go with a model: told by its chat template, or chosen by setting."""

from collections.abc import Mapping
from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.parsing import harmony
from aserve.parsing.answer import AnswerParser
from aserve.parsing.call_reader import short_call_id
from aserve.parsing.deltas import ReasoningParser, TextParser
from aserve.parsing.headed_call import DEEPSEEK_HEADER, DEEPSEEK_TAIL, HeadedCall
from aserve.parsing.json_call import JsonCall
from aserve.parsing.markers import SPACES
from aserve.parsing.mistral_calls import MistralCalls
from aserve.parsing.pythonic_calls import PythonicCalls
from aserve.parsing.reasoning import TaggedReasoning
from aserve.parsing.tool_calls import CallFormat, ToolCallParser, Tools
from aserve.parsing.xml_call import XmlCall

AUTO, NONE, HARMONY = "auto", "none", "harmony"

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        markers=("<tool_call>",),
        make_reader=lambda calls, tools: JsonCall(calls, tail=("</tool_call>",)),
        inner_markers=("</tool_call>",),
    ),
    "qwen3_coder": CallFormat(
        markers=("<tool_call>",),
        make_reader=lambda calls, tools: XmlCall(calls, ("</tool_call>",), tools),
        inner_markers=("</tool_call>",),
    ),
    "llama3_json": CallFormat(
        markers=("<|python_tag|>",),
        make_reader=lambda calls, tools: JsonCall(calls),
        bare="{",
        make_bare_reader=lambda calls, tools: JsonCall(calls, names=tools.keys()),
        separators=SPACES + ";",
    ),
    "mistral": CallFormat(
        markers=("[TOOL_CALLS]",),
        make_reader=lambda calls, tools: MistralCalls(calls),
        inner_markers=("[ARGS]", "[CALL_ID]"),
        make_id=short_call_id,
    ),
    "pythonic": CallFormat(
        markers=("<|python_start|>",),
        make_reader=lambda calls, tools: PythonicCalls(calls, tools.keys()),
        bare="[",
        noise=("<|python_end|>",),
    ),
    "deepseek": CallFormat(
        markers=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        make_reader=lambda calls, tools: HeadedCall(calls, DEEPSEEK_HEADER, DEEPSEEK_TAIL),
        noise=(
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
            "<\uff5ctool\u2581calls\u2581end\uff5c>",
            "<\uff5ctool\u2581call\u2581end\uff5c>",
        ),
        inner_markers=("<\uff5ctool\u2581sep\uff5c>",),
    ),
}

REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
ALIASES: Mapping[str, str] = {
    "deepseek_r1": "think", "deepseek_v3": "deepseek", "deepseek_v31": "deepseek", "gpt_oss": HARMONY,
    "gptoss": HARMONY,
    "llama": "llama3_json", "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic",
    "openai": HARMONY, "openai_gptoss": HARMONY, "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
TOOL_PARSERS = (*CALL_FORMATS, HARMONY)
REASONING_PARSERS = (*REASONING_TAGS, HARMONY)


def tool_parser(name: str, tools: Tools) -> TextParser:
    """Return a new parser of the calls in one answer; raise ConfigError for an unknown name."""
    name = canonical_name(name, "tool parser", TOOL_PARSERS)
    return harmony.HarmonyParser(finds_calls=True) if name == HARMONY else ToolCallParser(CALL_FORMATS[name], tools)


def reasoning_parser(name: str, *, is_open: bool = False) -> ReasoningParser:
    """Return a new parser of one answer, whose reasoning the prompt may have begun (``is_open``)."""
    name = canonical_name(name, "reasoning parser", REASONING_PARSERS)
    if name == HARMONY:
        return harmony.HarmonyParser(finds_calls=False)
    opening, closing = REASONING_TAGS[name]
    return TaggedReasoning(opening, closing, is_open=is_open)


def canonical_name(name: str, kind: str, known: tuple[str, ...]) -> str:
    """Return the name of a parser as the tables have it; raise ConfigError if there is none of that name."""
    plain = name.lower().replace("-", "_")
    for candidate in (plain, ALIASES.get(plain)):
        if candidate in known:
            return candidate
    aliases = [alias for alias, target in ALIASES.items() if target in known]
    raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join([AUTO, NONE, *known, *aliases])}")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one model writes calls and reasoning: names of parsers, None where nothing is to be found."""

    tool: str | None = None
    reasoning: str | None = None

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What stands around reasoning, None if nothing of the kind does."""
        return REASONING_TAGS.get(self.reasoning or "")

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parsers have to see; some of it may be special tokens, which decoding leaves out otherwise."""
        if HARMONY in (self.tool, self.reasoning):
            return harmony.MARKERS
        call_format = CALL_FORMATS.get(self.tool or "")
        calls = () if call_format is None else (*call_format.markers, *call_format.noise, *call_format.inner_markers)
        return (*calls, *REASONING_TAGS.get(self.reasoning or "", ()))

    def is_opened_by(self, prompt_end: str) -> bool:
        """Whether a prompt that ends like this has begun the reasoning already."""
        opening, _ = REASONING_TAGS.get(self.reasoning or "", ("", ""))
        return bool(opening) and prompt_end.rstrip().endswith(opening)

    def is_left_open_by(self, beginning: str) -> bool:
        """Whether an answer that begins like this, and is to be continued, stops within its reasoning."""
        opening, closing = REASONING_TAGS.get(self.reasoning or "", ("", ""))
        return bool(opening) and beginning.rfind(opening) > beginning.rfind(closing)

    def parser(
        self,
        tools: Tools | None = None,
        *,
        is_open: bool = False,
        max_calls: int | None = None,
    ) -> AnswerParser | None:
        """Return a new parser of one answer, None if there is nothing to be found in it.

        ``tools`` None: calls are text. ``is_open``: the prompt has begun the reasoning.
        """
        finds_calls = tools is not None and self.tool is not None
        if HARMONY in (self.tool, self.reasoning):
            return AnswerParser(harmony.HarmonyParser(finds_calls=finds_calls), None, max_calls=max_calls)
        reasoning = reasoning_parser(self.reasoning, is_open=is_open) if self.reasoning else None
        calls = tool_parser(self.tool, tools) if self.tool is not None and tools is not None else None
        return AnswerParser(reasoning, calls, max_calls=max_calls) if reasoning or calls else None


def choose_format(template: str, tool: str = AUTO, reasoning: str = AUTO) -> AnswerFormat:
    """Return what fits a chat template, its sources joined; settings other than "auto" decide by themselves.

    Without a word about tools in the template, tools are described to the model in Hermes' format
    (``tokenizer/tool_prompt.py``). Raises ConfigError for an unknown name.
    """
    return AnswerFormat(
        _by_setting(tool, "tool parser", TOOL_PARSERS, _tool_format_of(template)),
        _by_setting(reasoning, "reasoning parser", REASONING_PARSERS, _reasoning_format_of(template)),
    )


def _by_setting(setting: str, kind: str, known: tuple[str, ...], automatic: str | None) -> str | None:
    if setting == AUTO:
        return automatic
    return None if setting == NONE else canonical_name(setting, kind, known)


def _tool_format_of(template: str) -> str:
    signs = (
        (HARMONY, ("<|channel|>",)),
        ("deepseek", ("<\uff5ctool\u2581call\u2581begin\uff5c>",)),
        ("qwen3_coder", ("<function=",)),
        ("hermes", ("<tool_call>",)),
        ("mistral", ("[TOOL_CALLS]",)),
        ("pythonic", ("<|python_start|>", "[func_name1(")),
        ("llama3_json", ("<|python_tag|>", '"parameters": dictionary of argument name')),
    )
    return next((name for name, texts in signs if any(text in template for text in texts)), "hermes")


def _reasoning_format_of(template: str) -> str | None:
    if "<|channel|>" in template:
        return HARMONY
    return next((name for name, tags in REASONING_TAGS.items() if any(tag in template for tag in tags)), None)
