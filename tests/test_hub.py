"""Models by hub id, against a local stand-in for the hub; each fetch is a process with its own environment."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles_hub import HubStandIn

from aserve.hub import choose_files

REPO = "tiny/model"
FETCH = """
import json, sys
from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.model_files import locate_model
model, revision = json.loads(sys.argv[1])
try:
    files = locate_model(EngineConfig(model=model, revision=revision))
    inside = sorted(str(p.relative_to(files.path)) for p in files.path.rglob("*") if p.is_file())
    content = files.path.read_bytes() if files.path.is_file() else (files.path / "config.json").read_bytes()
    print(json.dumps([files.format, files.name, inside, content.decode()]))
except ConfigError as error:
    print(json.dumps({"error": str(error)}))
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


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    revisions = {"main": MAIN, "v2": {**MAIN, "config.json": b'{"v2": 1}'}}
    with HubStandIn(REPO, revisions).serve() as hub:
        yield hub


def fetch(hub: HubStandIn, home: Path, model: str = REPO, revision: str | None = None, **environment: str) -> Any:
    """Locate ``model`` in a fresh process whose hub cache is in ``home``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "_proxy" not in name}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", FETCH, json.dumps([model, revision])]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


def test_needed_files_only_and_never_pickles(hub: HubStandIn, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path) == ["safetensors", REPO, sorted(NEEDED), '{"main": 1}']
    assert hub.downloaded == NEEDED
    assert all(token is None for _, _, token in hub.requests)


def test_revision(hub: HubStandIn, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, revision="v2")[3] == '{"v2": 1}'
    assert fetch(hub, tmp_path, revision=hub.commit_of("v2"))[3] == '{"v2": 1}'
    assert fetch(hub, tmp_path)[3] == '{"main": 1}'
    assert "has no revision v9" in fetch(hub, tmp_path, revision="v9")["error"]


def test_offline_serves_what_is_cached(hub: HubStandIn, tmp_path: Path) -> None:
    assert "not in the hub's cache" in fetch(hub, tmp_path, HF_HUB_OFFLINE="1")["error"]
    fetch(hub, tmp_path)
    fetch(hub, tmp_path, revision="v2")
    hub.requests.clear()
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1") == ["safetensors", REPO, sorted(NEEDED), '{"main": 1}']
    assert fetch(hub, tmp_path, revision="v2", HF_HUB_OFFLINE="1")[3] == '{"v2": 1}'
    assert "not in the hub's cache" in fetch(hub, tmp_path, revision="v3", HF_HUB_OFFLINE="1")["error"]
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached(hub: HubStandIn, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9"
    assert "the hub cannot be asked" in fetch(hub, tmp_path, HF_ENDPOINT=closed)["error"]
    fetch(hub, tmp_path)
    assert fetch(hub, tmp_path, HF_ENDPOINT=closed)[0] == "safetensors"


def test_the_token_is_sent(hub: HubStandIn, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    refused = fetch(hub, tmp_path)["error"]
    assert "neither a local path nor a repository on the hub" in refused
    assert "HF_TOKEN" in refused
    assert fetch(hub, tmp_path, HF_TOKEN="hf_secret")[0] == "safetensors"
    hub.is_gated = True
    assert "is gated" in fetch(hub, tmp_path / "other", HF_TOKEN="hf_wrong")["error"]


def test_an_unknown_repository(hub: HubStandIn, tmp_path: Path) -> None:
    assert "no/such is neither" in fetch(hub, tmp_path, "no/such")["error"]


@pytest.mark.parametrize("model", [f"{REPO}:tiny.Q8_0.gguf", f"{REPO}:q8_0"])
def test_a_gguf_by_file_name_or_part_of_it(hub: HubStandIn, tmp_path: Path, model: str) -> None:
    hub.revisions = {"main": {"tiny.Q8_0.gguf": b"eight", "tiny.Q4_0.gguf": b"four", "README.md": b""}}
    assert fetch(hub, tmp_path, model) == ["gguf", "tiny.Q8_0", [], "eight"]
    assert hub.downloaded == {"tiny.Q8_0.gguf"}
    hub.requests.clear()
    assert fetch(hub, tmp_path, model, HF_HUB_OFFLINE="1") == ["gguf", "tiny.Q8_0", [], "eight"]


def test_a_repository_with_one_gguf(hub: HubStandIn, tmp_path: Path) -> None:
    hub.revisions = {"main": {"tiny.Q8_0.gguf": b"eight", "README.md": b""}}
    assert fetch(hub, tmp_path) == ["gguf", "tiny.Q8_0", [], "eight"]


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        (["a.gguf", "b.gguf"], REPO, "several GGUF files; name one of a.gguf, b.gguf"),
        (["a.gguf", "b.gguf"], f"{REPO}:c.gguf", "not exactly one GGUF file c.gguf"),
        (["config.json", "model.safetensors"], f"{REPO}:c.gguf", "no GGUF file c.gguf"),
        (["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], REPO, "split model"),
        (["config.json", "pytorch_model.bin"], REPO, r"pickles \(pytorch_model.bin\), which can run any code"),
        (["README.md"], REPO, "neither safetensors nor a GGUF"),
    ],
)
def test_repositories_that_are_refused(
    hub: HubStandIn, tmp_path: Path, files: list[str], model: str, message: str
) -> None:
    hub.revisions = {"main": {name: name.encode() for name in files}}
    error = fetch(hub, tmp_path, model)["error"]
    assert re.search(message, error), error
    assert not hub.downloaded


def test_original_weights_are_taken_where_there_are_no_others() -> None:
    names = ["config.json", "consolidated.safetensors", "x/model.safetensors"]
    assert choose_files(names) == ["consolidated.safetensors", "config.json"]
