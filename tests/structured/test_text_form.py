"""Custom tools' grammars: in each syntax of calls the client's input matches, and every input that does may come."""

import json
import re
from typing import Any

import orjson
import pytest
from doubles_http import demo_tokenizer
from doubles_structured import demo_compiler

from aserve.errors import ClientError
from aserve.parsing.deltas import ToolCallArguments
from aserve.parsing.registry import tool_parser
from aserve.request import GrammarSpec
from aserve.server.responses.custom_input import CustomInput
from aserve.structured.answer_rules import AnswerRules
from aserve.structured.call_syntax import CALL_SYNTAXES
from aserve.structured.json_text import within_json_string
from aserve.structured.lark_text import LarkText
from aserve.structured.text_form import TextForm

BAR, LOW = "\uff5c", "\u2581"
TOOL = "run"
SCHEMA = TextForm("regex", "").schema()
PARSERS = {"mistral_args": "mistral", "deepseek_fenced": "deepseek"}

PATCHES = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk  // what may be done
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
move: "*** Move to: " filename LF
change: (context | change_line)+ eof_line?
context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Update File: a "b"\\c.py\n@@ def f():\n- x = "\\n"\n+\ty = \'ž😀\'\n*** End Patch\n'
QUERIES = """
start: "SELECT"i SP cols SP "FROM"i SP table [SP "WHERE"i SP cond] ";"
?cols: NAME (","
    " "? NAME)*
table.2: NAME | STRING
cond: NAME " = " (STRING | NUMBER | "a".."c" | FLAG~2..3)
NAME: /[A-Za-z_]\\w{0,5}/
STRING: /"[^"]*"/
FLAG: "+" | "-"
SP: /[ \\t\\n]+/
%import common.NUMBER
"""
PAIRS = """
start: "{" pair ("," pair)* "}"
     | "nothing"i
pair: CNAME ":" INT
%ignore WS
%import common (CNAME, INT)
%import common.WS
"""
SUMS = """
start: sum
sum: product (("+" | "-") product)*
product: INT | "(" sum ")"
%import common.INT
%import common.WS
%ignore WS
"""
FORMS: dict[str, tuple[TextForm, list[str], list[str]]] = {  # what matches, and what does not
    "expression": (
        TextForm("regex", r'^(?P<day>Mon|Tue)\s[^"\\x]{1,9}$'),
        ["Mon\tabc", "Tue\n'/{}'", "Mon ž\u2028😀"],
        ['Mon a"b', "Mon a\\b", "Mon axb", "Wed a", "Mon ", " Mon a", "Mon abcdefghij"],
    ),
    "any text": (TextForm("regex", "(?s).*"), ["", '"\\/\b\f\n\r\t\x01\x1f', "a </parameter b"], []),
    "patches": (
        TextForm("lark", PATCHES),
        [PATCH, PATCH[:-1], "*** Begin Patch\n*** Add File: a\n+\n+</tool_call>\n*** End Patch"],
        [PATCH + "x", PATCH.replace("@@ ", "@@"), PATCH.replace("+\t", "\t"), "*** Begin Patch\n*** End Patch\n"],
    ),
    "queries": (
        TextForm("lark", QUERIES),
        ['select a, b,c FROM "my \\t"\twhere x = 1.5;', "SELECT a FROM t;", "SELECT a FROM t WHERE b = c;",
         "SELECT a FROM t WHERE b = ++-;"],
        ['SELECT a FROM "my"x";', "SELECT a FROM t WHERE b = d;", "SELECT a FROM t WHERE b = +;",
         "SELECT a,  b FROM t;", "SELECT abcdefgh FROM t;"],
    ),
    "white space is ignored": (
        TextForm("lark", PAIRS),
        ['{a:1}', "\n{ a : 12 ,\tb:2 }\n", "Nothing", " nothing"],
        ["{a b:1}", "{a:1 2}", "{a:1,}", "{n\nothing:1}", "noth ing"],
    ),
    "a rule within itself": (
        TextForm("lark", SUMS), ["1 + (2 - (3)) - 4", "(((1)))"], ["1 +", "(1", "1)", "1 x", '"1"']
    ),
}  # fmt: skip
SLIPPED = {  # where rules need themselves, white space that would be escaped is not written
    "a rule within itself": ["1\n+ 2"],
}


def call_of(syntax: str, text: str) -> str:
    """Return a call as the parsers know it, with the input in the form that its syntax has for texts."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    opening, closing = (f"<{BAR}tool{LOW}calls{LOW}{word}{BAR}>" for word in ("begin", "end"))
    begin, end = (f"<{BAR}tool{LOW}call{LOW}{word}{BAR}>" for word in ("begin", "end"))
    sep = f"<{BAR}tool{LOW}sep{BAR}>"
    return {
        "hermes": f'<tool_call>\n{{"name": "{TOOL}", "arguments": {arguments}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function={TOOL}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "llama3_json": f'{{"name": "{TOOL}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{TOOL}", "arguments": {arguments}}}]',
        "mistral_args": f"[TOOL_CALLS]{TOOL}[ARGS]{arguments}",
        "pythonic": f"[{TOOL}(input={json.dumps(text, ensure_ascii=False)})]",
        "deepseek": f"{opening}{begin}{TOOL}{sep}{arguments}{end}{closing}",
        "deepseek_fenced": f"{opening}{begin}function{sep}{TOOL}\n```json\n{arguments}\n```{end}{closing}",
        "harmony": f"<|channel|>commentary to=functions.{TOOL} <|constrain|>json<|message|>{arguments}",
    }[syntax]


def input_of(syntax: str, call: str) -> str:
    """Return what the client of the tool gets."""
    parser = tool_parser(PARSERS.get(syntax, syntax), {TOOL: SCHEMA})
    reader, text = CustomInput(), ""
    for delta in [*parser.push(call), *parser.flush()]:
        text += reader.push(delta.text) if isinstance(delta, ToolCallArguments) else ""
    return text + reader.flush()


def allows(syntax: str, form: TextForm, call: str, **fields: Any) -> bool:
    rules = {"must_call": True, "is_harmony": syntax == "harmony", "forms": {TOOL: form}, **fields}
    spec = AnswerRules(syntax=syntax, functions=((TOOL, SCHEMA),), **rules).spec()
    matcher = demo_compiler().compile(spec).start()
    ids = demo_tokenizer().encode(call)
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("syntax", CALL_SYNTAXES)
def test_calls_are_held_to_the_form_that_the_client_sees(syntax: str, name: str) -> None:
    form, good, bad = FORMS[name]
    for text in good:
        assert input_of(syntax, call_of(syntax, text)) == text
        assert allows(syntax, form, call_of(syntax, text)), text
    for text in [*bad, *SLIPPED.get(name, ())]:
        assert not allows(syntax, form, call_of(syntax, text)), text


@pytest.mark.parametrize("syntax", CALL_SYNTAXES)
def test_a_call_that_has_begun_within_text_is_held_too(syntax: str) -> None:
    form = TextForm("regex", "[a-z]+")
    assert allows(syntax, form, call_of(syntax, "abc"), must_call=False)
    assert not allows(syntax, form, call_of(syntax, "ABC"), must_call=False)
    answer = ("json_schema", '{"type":"object","properties":{"name":{"type":"integer"}},"required":["name"]}')
    assert allows(syntax, form, call_of(syntax, "abc"), must_call=False, answer=answer)
    is_held = syntax not in ("llama3_json", "pythonic")  # their calls may begin like the answer
    assert allows(syntax, form, call_of(syntax, "ABC"), must_call=False, answer=answer) is not is_held


NESTED_QUOTES = 'start: list\nlist: "[" (list | TEXT)* "]"\nTEXT: /"[a-z]*"/\n'


@pytest.mark.parametrize("syntax", CALL_SYNTAXES)
def test_what_cannot_be_held_is_free(syntax: str) -> None:
    """A rule within itself whose texts would be escaped: calls are held to the schema alone."""
    form = TextForm("lark", NESTED_QUOTES)
    assert form.quoted(LarkText({})) is None
    for text in ('[["a"]]', '[["a"]'):
        assert allows(syntax, form, call_of(syntax, text))


EXPRESSIONS = [  # with texts that Python's expressions, where they mean the same, and JSON's escapes are tried on
    r'[^"]*', r'[^"b]+', r"[^\\]*", r"[^\n]*", r"[^a]*", ".*", r"(?s:.)+", r"(?i:ab\n)c", r"\s+x", r"\S+",
    r"[\w\"\-\]]+", r"a{2,3}", r"[ -~]+", r"[^\S\n]+", r"[\s\S]*", r"\$\^", "é\"?", r"(?:a|\x22|\t){1,2}",
    r"[\]\\]+", r"\\[nt]",
]  # fmt: skip
TEXTS = ["", "a", "aa", "aaa", 'a"', 'a"b', "a\\b", "a\nb", "\t\n x", "AB\nc", "AB\nC", " ", '"-]', "\\]", "$^", 'é"',
         "\x01", "\\n", '"\t', " \t", " \n"]  # fmt: skip


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_within_a_json_string_an_expression_matches_the_same(pattern: str) -> None:
    rewritten, _ = within_json_string(pattern)
    grammar = f'start: "{{" BODY "}}"\nBODY: "\\"" /{rewritten}/ "\\""'
    for text in TEXTS:
        call = "{" + json.dumps(text, ensure_ascii=False) + "}"
        matcher = demo_compiler().compile(GrammarSpec("lark", grammar)).start()
        ids = demo_tokenizer().encode(call)
        is_allowed = matcher.validate_tokens(ids) == len(ids)
        assert is_allowed is (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        (TextForm("regex", "(?=a)b"), "group of this kind"),
        (TextForm("regex", "a^b"), "anchors within it"),
        (TextForm("regex", r"\p{Cc}"), r"\\p\{Cc\}"),
        (TextForm("regex", "[a"), "unfinished"),
        (TextForm("regex", r"\bx"), r"has \\b"),
        (TextForm("lark", 'begin: "a"'), "no rule 'start'"),
        (TextForm("lark", "start: missing"), "no 'missing'"),
        (TextForm("lark", 'start: "a'), "near"),
        (TextForm("lark", 'start: ("a"'), "near"),
        (TextForm("lark", 'start: "a" )'), "near"),
        (TextForm("lark", 'start: "a"\nstart: "b"'), "twice"),
        (TextForm("lark", "start: X\n%import common.X"), "cannot import"),
        (TextForm("lark", 'start: %json {"type": "string"}'), "near|cannot be used"),
        (TextForm("lark", "start: /a/x"), "flags"),
        (TextForm("lark", "start: N\n%import common.INT ->"), "cannot import"),
        (TextForm("lark", 'start: "\\ud800"'), "cannot be read"),
        (TextForm("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested too deeply"),
        (TextForm("regex", "[" * 5000 + "a" + "]" * 5000), "classes within"),
    ],
)
def test_what_is_no_form_is_refused_by_what_is_wrong(form: TextForm, fault: str) -> None:
    with pytest.raises(ClientError, match=fault):
        form.quoted(LarkText({}))


def test_forms_are_told_in_the_rules_of_an_answer() -> None:
    rules = AnswerRules(syntax="hermes", functions=((TOOL, SCHEMA),), forms={TOOL: TextForm("regex", "a")})
    assert AnswerRules.of(rules.spec()) == rules
    assert orjson.loads(rules.spec().text)["forms"][TOOL]["definition"] == "a"
