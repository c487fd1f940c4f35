"""How the served model writes calls and reasoning, and what that makes of one request: its grammar and its reader."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aserve.config import ServerConfig
from aserve.errors import ClientError
from aserve.parsing.answer_reader import AnswerReader
from aserve.parsing.registry import HARMONY, NONE, AnswerFormat, choose_format
from aserve.request import GrammarSpec, SamplingParams
from aserve.server.tools import ToolOptions
from aserve.structured.answer_rules import AnswerRules, ReasoningMarkers
from aserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PROMPT_END_TOKENS = 16  # in which a template's opening of the reasoning is looked for
SYNTAX_SIGNS = {  # parser -> what a template says where calls are written in another way than the usual
    "mistral": ("[ARGS]", "mistral_args"),
    "deepseek": ("```json", "deepseek_fenced"),
}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How one request is answered: ``params`` as the engine gets them, and what its choices are read with."""

    params: SamplingParams
    tools: dict[str, Any] | None  # name -> schema of the functions that are looked for
    answer_format: AnswerFormat
    is_open: bool = False  # the prompt has begun the reasoning
    max_calls: int | None = None

    def reader(self) -> AnswerReader | None:
        """Return a new reader for one choice, None if its text is all that there can be."""
        parser = self.answer_format.parser(self.tools, is_open=self.is_open, max_calls=self.max_calls)
        return AnswerReader(parser) if parser is not None else None


class AnswerStyle:
    """Made once for a model; ``plan`` for each request, when its prompt is known."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig) -> None:
        """Raises ConfigError if the settings name parsers that there are not."""
        template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._format = choose_format(template, config.tool_call_parser, config.reasoning_parser)
        self._syntax = self._format.tool or ""
        sign, variant = SYNTAX_SIGNS.get(self._syntax, ("", ""))
        if sign and sign in template:
            self._syntax = variant
        logger.info(
            "tool calls are read as %s (tool_call_parser is %s), reasoning as %s (reasoning_parser is %s)",
            self._syntax or NONE,
            config.tool_call_parser,
            self._format.reasoning or NONE,
            config.reasoning_parser,
        )

    def plan(
        self,
        options: ToolOptions,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        continued: str | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> AnswerPlan:
        """Return how a prompt of a chat is answered; ``continued`` is the text of an answer that it goes on with.

        The grammar of ``params`` is that of the answer itself: reasoning may come before it, and calls may come in its
        place. It is to be compiled afterwards. Raises ClientError for tools that this model's calls cannot express.
        """
        answer_format = self._format if options.callable else replace(self._format, tool=self._without_calls())
        finds_calls = bool(options.callable) and answer_format.tool is not None
        if options.choice == "required" and not finds_calls:
            raise ClientError(
                "no call can be required: this server does not look for calls (tool_call_parser is none)",
                param="tool_choice",
            )
        is_open = self._is_open(answer_format, prompt_ids, continued)
        is_harmony = HARMONY in (self._format.tool, self._format.reasoning) and continued is None
        thinks = answer_format.reasoning is not None and (continued is None or is_open)
        grammar = self._grammar(
            options if finds_calls else ToolOptions(),
            params.grammar,
            is_open=is_open,
            is_harmony=is_harmony,
            max_reasoning_tokens=max_reasoning_tokens if thinks else None,
        )
        kept = self._tokenizer.special_ids_of(answer_format.markers)
        if kept or grammar is not params.grammar:
            params = replace(params, grammar=grammar, kept_special_ids=kept)
        return AnswerPlan(
            params,
            {tool.name: tool.parameters for tool in options.callable} if finds_calls else None,
            answer_format,
            is_open,
            None if options.is_parallel else 1,
        )

    def _without_calls(self) -> str | None:
        return HARMONY if self._format.tool == HARMONY else None  # its channels have to be told apart all the same

    def _is_open(self, answer_format: AnswerFormat, prompt_ids: Sequence[int], continued: str | None) -> bool:
        if continued is not None:
            return answer_format.is_left_open_by(continued)
        if answer_format.reasoning is None:
            return False
        end = self._tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return answer_format.is_opened_by(end)

    def _grammar(
        self,
        options: ToolOptions,
        answer: GrammarSpec | None,
        *,
        is_open: bool,
        is_harmony: bool,
        max_reasoning_tokens: int | None,
    ) -> GrammarSpec | None:
        """Return the grammar of the whole answer, None if any text will do.

        ``is_harmony``: it begins with the header of a message.
        """
        must_call = options.choice == "required"
        is_held = must_call or any(tool.is_strict for tool in options.callable)
        tags = self._format.reasoning_tags
        if not is_held and (answer is None or not (tags or is_harmony or options.callable)):
            if max_reasoning_tokens is None:
                return answer
            if not is_harmony:
                options = ToolOptions()  # calls are free, like the text around them
        functions = tuple(
            (tool.name, tool.enforced_schema() if must_call or tool.is_strict else None) for tool in options.callable
        )
        rules = AnswerRules(
            syntax=self._syntax,
            functions=functions,
            forms={tool.name: tool.text_form for tool in options.callable if tool.text_form is not None},
            must_call=must_call,
            is_single=not options.is_parallel,
            answer=(answer.kind, answer.text) if answer is not None and not must_call else None,
            reasoning=ReasoningMarkers(*tags, is_open) if tags else None,
            is_harmony=is_harmony,
            max_reasoning_tokens=max_reasoning_tokens,
            token_ids=self._token_ids(),
        )
        try:
            return rules.spec()
        except ClientError as error:
            raise ClientError(f"the tools cannot be enforced: {error.message}", param="tools") from None

    def _token_ids(self) -> dict[str, int]:
        """Return those markers that are control tokens."""
        found = {}
        for marker in self._format.markers:
            for token_id in self._tokenizer.special_ids_of((marker,)):
                found[marker] = token_id
        return found
