"""The prompt format of gpt-oss as its public description has it: a template of our own words, and a checkpoint folder.

As published templates do, it shows instructions from the first message alone, one call a turn, and reasoning only as
long as no final answer has followed; and it refuses functions and parameters without a description.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from aserve.model_files import ModelFiles
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = r"""
{%- macro type_of(schema) -%}
  {%- if schema.enum -%} "{{ schema.enum | join('" | "') }}"
  {%- elif schema.type == "array" -%} {{ type_of(schema["items"]) }}[]
  {%- elif schema.type in ("integer", "number") -%} number
  {%- else -%} {{ schema.type or "any" }}
  {%- endif -%}
{%- endmacro -%}
{%- macro declare(function) -%}
  {{- "// " + function.description + "\ntype " + function.name + " = (" -}}
  {%- if function.parameters.properties -%}
    {{- "_: {\n" -}}
    {%- for name, schema in function.parameters.properties.items() -%}
      {{- "// " + schema.description + "\n" + name -}}
      {{- ("" if name in (function.parameters.required or []) else "?") + ": " + type_of(schema) + ",\n" -}}
    {%- endfor -%}
    {{- "}" -}}
  {%- endif -%}
  {{- ") => any;\n\n" -}}
{%- endmacro -%}
{%- macro say(header, text, end="<|end|>") -%}
  {{- "<|start|>" + header + "<|message|>" + text + end -}}
{%- endmacro -%}
{%- set effort = reasoning_effort if reasoning_effort is defined else "medium" -%}
{{- say("system", "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n\nReasoning: "
  + effort + "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
  + ("\nCalls to these tools must go to the commentary channel: 'functions'." if tools else "")) -}}
{%- set has_instructions = messages[0].role in ("developer", "system") -%}
{%- if has_instructions or tools -%}
  {{- "<|start|>developer<|message|>" -}}
  {%- if has_instructions -%} {{- "# Instructions\n\n" + messages[0].content -}} {%- endif -%}
  {%- if has_instructions and tools -%} {{- "\n\n" -}} {%- endif -%}
  {%- if tools -%}
    {{- "# Tools\n\n## functions\n\nnamespace functions {\n\n" -}}
    {%- for tool in tools -%} {{- declare(tool.function) -}} {%- endfor -%}
    {{- "} // namespace functions" -}}
  {%- endif -%}
  {{- "<|end|>" -}}
{%- endif -%}
{%- set turns = messages[1:] if has_instructions else messages -%}
{%- set last = namespace(call=none) -%}
{%- for turn in turns -%}
  {%- if turn.role == "user" -%}
    {{- say("user", turn.content) -}}
  {%- elif turn.role == "tool" -%}
    {%- if last.call is none -%} {{- raise_exception("a result without a call") -}} {%- endif -%}
    {{- say("functions." + last.call + " to=assistant<|channel|>commentary", turn.content | tojson) -}}
  {%- elif turn.role == "assistant" and turn.tool_calls -%}
    {%- set is_answered = namespace(yes=false) -%}
    {%- for later in turns[loop.index:] -%}
      {%- if later.role == "assistant" and not later.tool_calls -%} {%- set is_answered.yes = true -%} {%- endif -%}
    {%- endfor -%}
    {%- if turn.content and turn.thinking -%} {{- raise_exception("content and thinking at once") -}} {%- endif -%}
    {%- if (turn.content or turn.thinking) and not is_answered.yes -%}
      {{- say("assistant<|channel|>analysis", turn.content or turn.thinking) -}}
    {%- endif -%}
    {%- set call = turn.tool_calls[0].function -%}
    {%- set header = "assistant to=functions." + call.name + "<|channel|>commentary json" -%}
    {{- say(header, call.arguments | tojson, "<|call|>") -}}
    {%- set last.call = call.name -%}
  {%- elif turn.role == "assistant" -%}
    {%- set is_final = loop.last and not add_generation_prompt -%}
    {{- say("assistant<|channel|>final", turn.content, "<|return|>" if is_final else "<|end|>") -}}
    {%- set last.call = none -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%} {{- "<|start|>assistant" -}} {%- endif -%}
"""


def write_harmony_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write what a checkpoint of gpt-oss has beside its weights; each byte is a token, each marker a control token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", *MARKERS)]
    )
    backend.save(str(folder / "tokenizer.json"))
    ends = [backend.token_to_id(text) for text in ("<|return|>", "<|endoftext|>", "<|call|>")]
    files = {
        "config": {"eos_token_id": ends[0], **(config or {})},
        "generation_config": {"eos_token_id": ends},
        "tokenizer_config": {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def harmony_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of such a folder."""
    return load_tokenizer(ModelFiles(write_harmony_folder(folder), "safetensors", "gpt-oss"))
