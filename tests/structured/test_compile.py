"""What is refused and why, what is kept, and that a refusal is remembered (B39)."""

import json
from typing import Any

import pytest
from doubles_http import demo_tokenizer
from doubles_structured import demo_compiler

from aserve.errors import ClientError
from aserve.request import GrammarKind, GrammarSpec, SamplingParams
from aserve.structured import compile as compile_module
from aserve.structured.compile import GrammarCompiler
from aserve.structured.vocabulary import TokenBytes, build_vocabulary


def refusal(kind: GrammarKind, text: str) -> str:
    with pytest.raises(ClientError) as caught:
        demo_compiler().compile(GrammarSpec(kind, text))
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 700
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "frob"}, "frob"),
        ({"$ref": "#/nope"}, "/nope"),
        ({"$ref": "#"}, "no output"),
        (True, "must be an object"),
        ([], "must be an object"),
        (None, "must be an object"),
        ("", "must be an object"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"enum": []}, "empty"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "frobnicate"}, "frobnicate"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
        ({"$ref": "http://example.com/schema.json"}, "example.com"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_what_is_wrong(schema: Any, said: str) -> None:
    assert said in refusal("json_schema", json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", "nul", '{"type": "string"', "'a'"])
def test_a_schema_must_be_json(text: str) -> None:
    assert "not valid JSON" in refusal("json_schema", text)


def test_a_deep_schema_is_refused_before_it_is_compiled() -> None:
    text = '{"items":' * 101 + "{}" + "}" * 101
    assert "levels deep" in refusal("json_schema", text)
    assert "JSON" in refusal("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000)


def test_size_is_limited_for_every_kind() -> None:
    for kind in ("json_schema", "regex", "lark", "choice"):
        with pytest.raises(ClientError, match="more than 131072"):
            GrammarSpec(kind, "a" * (1 << 17) + "b")
    GrammarSpec("regex", "a" * (1 << 17))


@pytest.mark.parametrize("text", ["[", "(?=a)b", r"a\b", "(a", "*"])
def test_a_regex_that_cannot_be_used_is_refused(text: str) -> None:
    assert "regex" in refusal("regex", text)


@pytest.mark.parametrize("text", ["", "frob", "start: foo", 'start: "a', 'x: "a"', 'start: ("a"'])
def test_a_grammar_that_cannot_be_used_is_refused(text: str) -> None:
    assert "lark" in refusal("lark", text)


@pytest.mark.parametrize("text", ["[]", "{}", '["a", 1]', '[""]', "null", "x", json.dumps(["a"] * 4097)])
def test_choices_are_strings_that_are_not_empty(text: str) -> None:
    refusal("choice", text)


def test_what_the_vocabulary_cannot_express_is_refused() -> None:
    """The demo's vocabulary has no byte f1, with which U+40000 begins."""
    assert refusal("choice", '["\U00040000"]') == compile_module.NOTHING_FITS
    assert refusal("regex", "a\U00040000") == compile_module.NOTHING_FITS


@pytest.mark.parametrize("wrong", [b"frob", None, 5, ["a"]])
def test_a_spec_checks_its_own_types(wrong: Any) -> None:
    with pytest.raises(ClientError):
        GrammarSpec(wrong, "a")
    with pytest.raises(ClientError):
        GrammarSpec("regex", wrong)
    with pytest.raises(ClientError):
        SamplingParams(grammar=wrong or "a")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ClientError, match="surrogate"):
        GrammarSpec("regex", "a\ud800")


def test_a_schema_cannot_change_how_json_is_written() -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer"},
        "x-guidance": {"whitespace_pattern": " *", "lenient": True},
    }
    matcher = demo_compiler().compile(GrammarSpec("json_schema", json.dumps(schema))).start()
    blanks = demo_tokenizer().encode("[  ")
    assert matcher.validate_tokens(blanks) < len(blanks)
    unenforceable = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert "uniqueItems" in refusal("json_schema", json.dumps(unenforceable))


def test_results_and_refusals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[GrammarSpec] = []

    def compile_now(spec: GrammarSpec, vocabulary: object) -> str:
        calls.append(spec)
        if spec.text == "bad":
            raise ClientError("bad", param="grammar")
        return f"compiled {spec.text}"

    monkeypatch.setattr(compile_module, "CompiledGrammar", compile_now)
    monkeypatch.setattr(compile_module, "MAX_CACHED", 3)
    compiler = GrammarCompiler(demo_tokenizer())
    for _ in range(3):
        assert compiler.compile(GrammarSpec("regex", "a")) == "compiled a"
        with pytest.raises(ClientError, match="bad"):
            compiler.compile(GrammarSpec("regex", "bad"))
        with pytest.raises(ClientError, match="bad"):
            compiler.find(GrammarSpec("regex", "bad"))
    assert len(calls) == 2
    assert compiler.find(GrammarSpec("lark", "a")) is None
    compiler.compile(GrammarSpec("regex", "b"))
    compiler.compile(GrammarSpec("regex", "a"))
    compiler.compile(GrammarSpec("regex", "c"))  # "bad" has not been asked for the longest time
    assert compiler.find(GrammarSpec("regex", "bad")) is None
    assert compiler.find(GrammarSpec("regex", "a")) is not None


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(ClientError, match="end token"):
        build_vocabulary(TokenBytes((b"a", b"b"), (), ()))


def test_token_bytes_survive_the_way_to_another_process() -> None:
    table = TokenBytes.of(demo_tokenizer())
    assert TokenBytes.load(table.dump()) == table
    assert table.pieces[10813] == b"\xf0\x9f"
    assert table.eos_ids == (2,)
