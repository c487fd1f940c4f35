"""``aserve check`` says what this machine offers."""

import json
import platform
from importlib import metadata

import pytest

from aserve.attention import cake_blackwell
from aserve.cli import main
from aserve.commands import check


def test_json_names_devices_backends_methods_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert platform.machine() in report["devices"]["cpu"]
    assert report["python"] == platform.python_version()
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["attention_backends"]["torch"] is None
    assert report["quantization"]["none"] is None


def test_the_table_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert f"torch              {metadata.version('torch')}" in text
    assert "attention backends" in text
    assert "usable" in text


def test_a_backend_for_one_phase_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"fa": "for decode: it has no split-KV", "fi": "the package is not installed", "torch": None}
    monkeypatch.setattr(check, "refusals_here", lambda: report)
    lines = check.format_report(check.machine_report()).splitlines()
    assert "  fa                 refused for decode: it has no split-KV" in lines
    assert "  fi                 refused: the package is not installed" in lines
    assert "  torch              usable" in lines


MODEL = ["Llama-3.1-8B", "--random-weights"]


def test_variants_of_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--gpu", "8.0"]) == 0
    variants = json.loads(capsys.readouterr().out)["cake_variants"]
    assert variants["decode-16-d128"] is None
    assert variants["decode-8-d128"] == "float8_e4m3fn needs a GPU of compute capability 8.9 or more, not 8.0"
    assert variants["decode-plain"] is None
    assert main(["check", "--gpu", "7.0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[:1] == ["decode-16-d128"])
    assert "refused: it has no launches for compute capability 7.0" in line


def test_what_serves_a_model_and_why_the_faster_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *MODEL, "--gpu", "9.0:NVIDIA H200", "--kv-cache-dtype", "fp8", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["name"] == "Llama-3.1-8B"
    (layer,) = model["cake_layers"]
    assert layer["heads"] == "32/8 x 128"
    assert (layer["dtype"], layer["kv_dtype"], layer["window"]) == ("bfloat16", "float8_e4m3fn", None)
    (step,) = layer["decode"]
    assert (step["variant"], step["max_seqs"]) == ("decode-8-d128", 320)
    assert step["refused"]["decode-8-d64"] == "it knows head_dim 64, not 128"
    assert layer["prefill"]["variant"] == "prefill-8-d128"
    assert layer["prefill"]["refused"]["prefill-8-d64"] == "it knows head_dim 1 to 64, not 128"
    assert step["refused"]["decode-16-d128"] == "it does not read float8_e4m3fn with queries in bfloat16"


def test_what_verifies_drafts_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    guesses = ["--speculation", "ngram", "--num-speculative-tokens", "3"]
    assert main(["check", *MODEL, "--gpu", "9.0", *guesses, "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["model"]["cake_layers"]
    assert (layer["drafts"]["variant"], layer["drafts"]["max_queries"]) == ("several-16-d128", 4)
    assert layer["drafts"]["refused"] == {"several-16-d64": "it knows head_dim 64, not 128"}
    assert main(["check", *MODEL, "--gpu", "9.0", *guesses]) == 0
    told = "    drafts: several-16-d128 for head_dim 128, up to 4 queries of a sequence (several-16-d64: it knows head"
    assert told in capsys.readouterr().out
    assert main(["check", *MODEL, "--gpu", "9.0", "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["model"]["cake_layers"]
    assert layer["drafts"] is None, "without speculation there are none"


def test_the_table_shows_pinned_variants(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = ["--attention-backend", "fa,cake", "--cake-variants", "decode-plain"]
    assert main(["check", *MODEL, "--gpu", "9.0", *pinned, "--max-num-seqs", "8"]) == 0
    text = capsys.readouterr().out
    assert "cake variants for Llama-3.1-8B\n  32/8 x 128, bfloat16 keys with bfloat16 queries\n" in text
    assert "    decode: decode-plain for head_dim 128, up to 8 sequences (the first row)" in text


def test_a_pinned_variant_that_does_not_serve_the_model_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = ["--attention-backend", "fa,cake", "--cake-variants", "decode-16-d64"]
    assert main(["check", *MODEL, "--gpu", "9.0", *pinned]) == 0
    text = capsys.readouterr().out
    assert (
        "decode: no variant for head_dim 128, up to 320 sequences (decode-16-d64: it knows head_dim 64, not 1" in text
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cake-variants", "decode-16"], "cake_variants: unknown variant 'decode-16'; known: decode-16-d64-short, "),
        (["--cake-variants", "decode-plain"], "cake_variants: decode-plain needs attention_backend 'cake'"),
    ],
)
def test_pins_of_no_use_are_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *MODEL, "--gpu", "9.0", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9", "Hopper", "9.0.1", ":NVIDIA H200"])
def test_a_gpu_is_told_by_its_capability(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--gpu", value])
    assert "must be like 9.0" in capsys.readouterr().err


def test_without_a_gpu_variants_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "_gpu_here", lambda: None)
    assert main(["check", *MODEL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["cake_variants"].values()) == {"torch finds no CUDA device"}
    assert report["model"]["cake_layers"] == []
    assert report["model"]["attention_backends"]["torch"] is None


def test_a_blackwell_gpu_with_flash_infers_own_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "  decodes by FlashInfer's own cake kernels; otherwise by these"
    monkeypatch.setattr(cake_blackwell, "cake_fmha_refusal", lambda: None)
    assert main(["check", *MODEL, "--gpu", "10.0"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert main(["check", *MODEL, "--gpu", "9.0", "--json"]) == 0
    told = "FlashInfer's cake kernels are for compute capability 10.0 and 10.3"
    assert json.loads(capsys.readouterr().out)["model"]["flash_infer_cake"] == told
    assert main(["check", *MODEL, "--gpu", "9.0"]) == 0
    assert line not in capsys.readouterr().out
