"""A model's chat template: messages in, the prompt's text with marks out (see ``control_tokens``)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import jinja2
from jinja2 import meta

from aserve.errors import ClientError
from aserve.tokenizer.control_tokens import END_MARK, ControlTokens, unmark
from aserve.tokenizer.messages import (
    count_chars,
    join_leading_system_messages,
    leave_out_empty_content,
    normalize_messages,
    split_parallel_calls,
    write_out_arguments,
)
from aserve.tokenizer.template_needs import TemplateNeeds
from aserve.tokenizer.template_sandbox import MAX_ITERATIONS, OutputTooLongError, TemplateSandbox
from aserve.tokenizer.tool_prompt import spell_out_tools

MAX_REASON_CHARS = 500
MAX_PROBE_CHARS, MAX_PROBE_ITERATIONS = 1 << 20, 10_000  # of small chats
TESTS_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)  # what null means is up to it
CHANGES = (join_leading_system_messages, write_out_arguments, split_parallel_calls)


class ChatTemplate:
    """Templates by name, ``default`` and perhaps ``tool_use``, compiled once. Safe to use from several threads.

    ``variables`` are what templates see besides the messages: ``bos_token``, ``eos_token`` and so on.
    A template that does not compile refuses each chat with the reason; prompts are still served. One that knows
    nothing of tools gets them, calls and their results as text in a general form (``tool_prompt``). What one would
    leave out without a word (``template_needs``) is put into a form that it shows.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], control_tokens: ControlTokens) -> None:
        self._control_tokens = control_tokens
        self._variables = dict(variables)
        self._sandbox = TemplateSandbox(control_tokens)
        self._sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}
        self._knows_tools: dict[str, bool] = {}
        self._tests_content = {name: bool(TESTS_CONTENT.search(source)) for name, source in sources.items()}
        self._refusal: str | None = None if sources else "this model has no chat template; use /v1/completions"
        try:
            self._compiled = {name: self._sandbox.compile_template(source) for name, source in sources.items()}
            self._knows_tools = {name: self._reads_tools(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            self._refusal = f"this model's chat template cannot be compiled: {error}"
        self._needs = {name: self._find_needs(name) for name in self._compiled}

    @property
    def source(self) -> str:
        """All templates, joined."""
        return "\n".join(self._sources.values())

    @property
    def is_usable(self) -> bool:
        """Whether there is a template and it compiles."""
        return self._refusal is None

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        max_chars: int,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text, at most ``max_chars`` of it, with marks in what the request said.

        ``kwargs`` are a request's own variables, such as ``enable_thinking``; they replace none of the others. What
        the template refuses is given to it in other forms: several system messages at the beginning as one, the
        arguments of calls as text, a turn for each call.

        Raises ClientError if the messages, or the template on seeing them, are at fault.
        """
        name = self._choose(bool(tools))
        normalized = normalize_messages(messages, has_developer_role=self._has_developer_role(name))
        if not self._knows_tools[name]:
            normalized, tools = spell_out_tools(normalized, tools), None
        if len(normalized) > max_chars or count_chars(normalized) > max_chars:
            raise PromptTooLongError
        normalized, tools = self._needs[name].fit(normalized, tools)
        has_prompt = add_generation_prompt and not continue_final_message
        variables = self._own_variables(self._mark(tools) if tools else None, add_generation_prompt=has_prompt)
        if taken := sorted(variables.keys() & (kwargs or {}).keys()):
            raise ClientError(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
        variables |= self._mark(kwargs or {})
        text = self._render_some_form(name, normalized, variables, max_chars, continue_final_message)
        return _cut_at_end_mark(text) if continue_final_message else text

    def _own_variables(self, tools: Any, *, add_generation_prompt: bool) -> dict[str, Any]:
        return {
            **self._variables,
            "messages": None,  # in each of their forms
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _find_needs(self, name: str) -> TemplateNeeds:
        def render(messages: list[dict[str, Any]], tools: Sequence[Any] | None) -> str:
            variables = self._own_variables(tools, add_generation_prompt=True) | {"messages": messages}
            try:
                return self._render(self._compiled[name], variables, MAX_PROBE_CHARS, MAX_PROBE_ITERATIONS)
            except PromptTooLongError:
                raise ClientError("a small chat becomes a very long prompt", param="messages") from None

        second = "developer" if self._has_developer_role(name) else "system"
        return TemplateNeeds.find(render, leading_roles=("system", second))

    def _has_developer_role(self, name: str) -> bool:
        return "developer" in self._sources[name]

    def _render_some_form(
        self,
        name: str,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        max_chars: int,
        continue_final_message: bool,
    ) -> str:
        """Render the first form of ``messages`` that the template takes; raise its error about the first of all."""
        refusal: ClientError | None = None
        for form in _forms(messages):
            asked = leave_out_empty_content(form) if self._tests_content[name] else form
            marked = self._mark_messages(asked, continue_final_message)
            try:
                return self._render(self._compiled[name], {**variables, "messages": marked}, max_chars)
            except ClientError as error:
                refusal = refusal or error
        assert refusal is not None  # there is always a first form
        raise refusal

    def _reads_tools(self, source: str) -> bool:
        return "tool_calls" in source or "tools" in meta.find_undeclared_variables(self._sandbox.parse(source))

    def _choose(self, has_tools: bool) -> str:
        if self._refusal is not None:
            raise ClientError(self._refusal, param="messages")
        if has_tools and "tool_use" in self._sources:
            return "tool_use"
        return "default" if "default" in self._sources else next(iter(self._sources))

    def _mark(self, value: Any) -> Any:
        try:
            return self._control_tokens.mark_all(value)
        except RecursionError:
            raise ClientError(
                "messages, tools or chat_template_kwargs are nested too deeply", param="messages"
            ) from None

    def _mark_messages(self, messages: list[dict[str, Any]], continue_final_message: bool) -> Any:
        marked = self._mark(messages)
        if continue_final_message:
            _set_end_mark(marked)
        return marked

    def _render(
        self,
        template: jinja2.Template,
        variables: dict[str, Any],
        max_chars: int,
        max_iterations: int = MAX_ITERATIONS,
    ) -> str:
        try:
            return self._sandbox.render(template, variables, max_chars, max_iterations)
        except OutputTooLongError:
            raise PromptTooLongError from None
        except Exception as error:  # a template is foreign code: what it raises on some input can be anything
            reason = unmark(str(error)).encode(errors="replace").decode()[:MAX_REASON_CHARS]
            raise ClientError(
                f"this model's chat template refuses the messages: {reason or type(error).__name__}", param="messages"
            ) from error


class PromptTooLongError(Exception):
    """The text is certainly longer than was allowed."""


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield ``messages`` as they are, and then in the forms that some templates want, the fewest changes first."""
    for count in range(len(CHANGES) + 1):
        for changes in combinations(CHANGES, count):
            form = messages
            for change in changes:
                changed = change(form)
                if changed is form:
                    break
                form = changed
            else:
                yield form


def _set_end_mark(messages: list[dict[str, Any]]) -> None:
    messages[-1] = {**messages[-1], "content": (messages[-1]["content"] or "") + END_MARK}


def _cut_at_end_mark(text: str) -> str:
    """Drop what the template puts after the text of the last message."""
    head, mark, _ = text.rpartition(END_MARK)
    if not mark:
        raise ClientError("this model's chat template cannot continue the final message", param="messages")
    return head.replace(END_MARK, "")
