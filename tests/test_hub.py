"""Models by hub id, against a local stand-in for the hub; each fetch is a process with its own environment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles_hub import HubStandIn

from aserve.hub import choose_files

REPO = "tiny/model"
LOCATE = """
import json, sys
from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.model_files import locate_model

def locate(model, revision):
    try:
        files = locate_model(EngineConfig(model=model, revision=revision))
    except ConfigError as error:
        return str(error)
    inside = sorted(str(path.relative_to(files.path)) for path in files.path.rglob("*") if path.is_file())
    content = files.path if files.path.is_file() else files.path / "config.json"
    return [files.format, files.name, inside, content.read_text()]

print(json.dumps([locate(*model) for model in json.loads(sys.argv[1])]))
"""

NAMES = [
    "config.json", "generation_config.json", "model.safetensors", "consolidated.safetensors", "tokenizer.json",
    "tokenizer_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "pytorch_model.bin",
    "training_args.pt", "README.md", "original/params.json", "onnx/model.onnx",
]  # fmt: skip
MAIN = {name: name.encode() for name in NAMES} | {"config.json": b'{"main": 1}'}  # equal content would be fetched once
NEEDED = set(MAIN) - {
    "consolidated.safetensors", "pytorch_model.bin", "training_args.pt", "README.md", "original/params.json",
    "onnx/model.onnx",
}  # fmt: skip


GGUFS = {"tiny.Q8_0.gguf": b"eight", "tiny.Q4_0.gguf": b"four", "README.md": b""}


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    repos = {
        REPO: {"main": MAIN, "v2": {**MAIN, "config.json": b'{"v2": 1}'}},
        "tiny/ggufs": {"main": GGUFS},
        "tiny/gguf": {"main": {"tiny.Q8_0.gguf": b"eight", "README.md": b""}},
    }
    with HubStandIn(repos).serve() as hub:
        yield hub


def locate(hub: HubStandIn, home: Path, *models: str | tuple[str, str], **environment: str) -> list[Any]:
    """Locate each model, or (model, revision), in one fresh process whose hub cache is in ``home``.

    The result of a model is [format, name, files in the folder, content of config.json or the GGUF], or the
    text of the error.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "_proxy" not in name}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **environment}
    pairs = [model if isinstance(model, tuple) else (model, None) for model in models]
    command = [sys.executable, "-c", LOCATE, json.dumps(pairs)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    results: list[Any] = json.loads(finished.stdout.splitlines()[-1])
    return results


def test_needed_files_only_and_never_pickles(hub: HubStandIn, tmp_path: Path) -> None:
    assert locate(hub, tmp_path, REPO) == [["safetensors", REPO, sorted(NEEDED), '{"main": 1}']]
    assert hub.downloaded == NEEDED
    assert all(token is None for _, _, token in hub.requests)


def test_revision(hub: HubStandIn, tmp_path: Path) -> None:
    commit = hub.commit_of("v2")
    tag, same, main, missing = locate(hub, tmp_path, (REPO, "v2"), (REPO, commit), REPO, (REPO, "v9"))
    assert (tag[3], same[3], main[3]) == ('{"v2": 1}', '{"v2": 1}', '{"main": 1}')
    assert "has no revision v9" in missing


def test_offline_serves_what_is_cached(hub: HubStandIn, tmp_path: Path) -> None:
    models = [REPO, (REPO, "v2"), "tiny/ggufs:q8_0"]
    assert all("not in the hub's cache" in error for error in locate(hub, tmp_path, *models, HF_HUB_OFFLINE="1"))
    assert hub.requests == []
    online = locate(hub, tmp_path, *models)
    hub.requests.clear()
    offline = locate(hub, tmp_path, *models, (REPO, "v3"), "tiny/ggufs:q4_0", HF_HUB_OFFLINE="1")
    assert offline[:3] == online
    assert all("not in the hub's cache" in error for error in offline[3:])
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached(hub: HubStandIn, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9"
    assert "the hub cannot be asked" in locate(hub, tmp_path, REPO, HF_ENDPOINT=closed)[0]
    online = locate(hub, tmp_path, REPO)
    assert locate(hub, tmp_path, REPO, HF_ENDPOINT=closed) == online


def test_the_token_is_sent(hub: HubStandIn, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    (refused,) = locate(hub, tmp_path, REPO)
    assert "neither a local path nor a repository on the hub" in refused
    assert "HF_TOKEN" in refused
    assert locate(hub, tmp_path, REPO, HF_TOKEN="hf_secret")[0][0] == "safetensors"
    hub.is_gated = True
    assert "is gated" in locate(hub, tmp_path / "other", REPO, HF_TOKEN="hf_wrong")[0]


def test_a_gguf_by_file_name_part_of_it_or_alone(hub: HubStandIn, tmp_path: Path) -> None:
    results = locate(hub, tmp_path, "tiny/ggufs:tiny.Q8_0.gguf", "tiny/ggufs:q8_0", "tiny/gguf")
    assert results == [["gguf", "tiny.Q8_0", [], "eight"]] * 3
    assert hub.downloaded == {"tiny.Q8_0.gguf"}


REFUSED = [
    ("no/such", [], "no/such is neither"),
    ("bad/two", ["a.gguf", "b.gguf"], "several GGUF files; name one of a.gguf, b.gguf"),
    ("bad/two:c.gguf", [], "not exactly one GGUF file c.gguf"),
    ("bad/none", ["config.json", "model.bin"], "pickles (model.bin), which can run any code"),
    ("bad/none:c.gguf", [], "no GGUF file c.gguf"),
    ("bad/split", ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], "split model"),
    ("bad/empty", ["README.md"], "neither safetensors nor a GGUF"),
    ("bad/na--me", [], "is not a valid hub id"),
]


def test_repositories_that_are_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.repos = {model: {"main": {name: name.encode() for name in names}} for model, names, _ in REFUSED if names}
    errors = locate(hub, tmp_path, *(model for model, _, _ in REFUSED))
    for error, (model, _, message) in zip(errors, REFUSED, strict=True):
        assert message in error, model
    assert not hub.downloaded


def test_original_weights_are_taken_where_there_are_no_others() -> None:
    names = ["config.json", "consolidated.safetensors", "x/model.safetensors"]
    assert choose_files(names) == ["consolidated.safetensors", "config.json"]
