"""What an engine loads before it says that it is ready."""

from types import SimpleNamespace
from typing import Any

import pytest
from doubles_engine import EOS, LIMITS, LetterTokenizer, letters

from aserve.config import EngineConfig
from aserve.engine import parts
from aserve.runner.scripted import ScriptedRunner
from aserve.structured.compile import GrammarCompiler


@pytest.mark.parametrize(("is_given", "eos", "times"), [(False, {EOS}, 1), (False, set(), 0), (True, {EOS}, 0)])
def test_the_vocabulary_of_grammars_is_ready_with_the_model_if_it_can_have_any(
    is_given: bool, eos: set[int], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(GrammarCompiler, "load_vocabulary", lambda compiler: built.append(compiler))
    runner, tokenizer = ScriptedRunner(LIMITS, letters), LetterTokenizer()
    tokenizer.eos_token_ids = frozenset(eos)
    monkeypatch.setattr(parts, "_locate", lambda config: SimpleNamespace(name="model"))
    monkeypatch.setattr(parts, "_load_tokenizer", lambda files: tokenizer)
    monkeypatch.setattr(parts, "_build_runner", lambda *given: runner)
    given = (runner, tokenizer) if is_given else (None, None)
    loaded = parts.load_parts(EngineConfig(), *given)  # type: ignore[arg-type]
    assert loaded.runner is runner
    assert len(built) == times
    runner.close()
