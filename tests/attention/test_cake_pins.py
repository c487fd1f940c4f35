"""Variants of the cake family that a setting pins."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles_attention import make_problem

from aserve.attention import registry
from aserve.attention.base import PHASES, AttentionProblem, Phase
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.cake_choice import choose_decodes
from aserve.attention.registry import check_variants, resolve_backend
from aserve.config import load_config
from aserve.errors import ConfigError
from aserve.kernels.cake.tables import variant_names
from aserve.registry import Entry, Registry

CPU = torch.device("cpu")


def pinned(*names: str, head_dim: int = 128) -> AttentionProblem:
    problem = make_problem("cuda", torch.bfloat16, head_dim=head_dim)
    return replace(problem, capability=(9, 0), cake_variants=names)


def test_a_pinned_variant_takes_the_place_of_the_faster_ones() -> None:
    (kind,) = pinned().kinds
    (free,), (held,) = (choose_decodes(problem, kind) for problem in (pinned(), pinned("decode-plain")))
    assert free.choice.variant is not None
    assert free.choice.variant.name == "decode-16-d128"
    assert held.choice.variant is not None
    assert held.choice.variant.name == "decode-plain"
    assert not held.choice.refusals, "the others are not asked"


def test_a_pinned_variant_that_does_not_serve_the_model_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        registry,
        "BACKENDS",
        Registry(
            "attention backend",
            {
                "torch": Entry("aserve.attention.torch_backend:TorchBackend"),
                "cake": Entry("aserve.attention.cake_backend:CakeBackend"),
            },
        ),
    )
    reason = "decode-16-d64 is pinned: it knows head_dim 64, not 128"
    assert CakeBackend.refuse(pinned("decode-16-d64"), "decode") == reason
    with pytest.raises(ConfigError, match=f"'cake' cannot serve this model: {reason}"):
        resolve_backend("torch,cake", pinned("decode-16-d64"), CPU)
    few = "decode-16-d256-few is pinned: it serves steps of 4 sequences at most, not 320"
    assert CakeBackend.refuse(pinned("decode-16-d256-few", head_dim=256), "decode") == few
    assert CakeBackend.refuse(pinned("decode-16-d256", head_dim=256), "decode") is None


@pytest.mark.parametrize(
    ("names", "max_drafts", "phase", "reason"),
    [
        (("decode-16-d128", "decode-16-d64"), 0, "decode", "decode-16-d64 is pinned: it knows head_dim 64, not 128"),
        (
            ("decode-plain", "decode-16-d128"),
            0,
            "decode",
            "decode-plain is pinned: layers are served by rows before it, decode-16-d128",
        ),
        (("prefill-16-d64",), 0, "prefill", "prefill-16-d64 is pinned: it knows head_dim 1 to 64, not 128"),
        (
            ("prefill-16-d128", "prefill-plain"),
            0,
            "prefill",
            "prefill-plain is pinned: layers are served by rows before it, prefill-16-d128",
        ),
        (("several-16-d64",), 3, "prefill", "several-16-d64 is pinned: it knows head_dim 64, not 128"),
        (
            ("several-16-d128",),
            0,
            "prefill",
            "several-16-d128 is pinned: it verifies drafts, of which there are none without speculation",
        ),
    ],
)
def test_a_pin_that_nothing_asks_for_is_refused_with_the_reason(
    names: tuple[str, ...], max_drafts: int, phase: Phase, reason: str
) -> None:
    problem = replace(pinned(*names), max_drafts=max_drafts)
    assert CakeBackend.refuse(problem, phase) == reason
    other: Phase = "decode" if phase == "prefill" else "prefill"
    assert CakeBackend.refuse(problem, other) is None


def test_pins_that_serve_different_layers_or_steps_are_all_taken() -> None:
    kinds = tuple(pinned(head_dim=head_dim).kinds[0] for head_dim in (256, 512))
    names = ("decode-16-d256-few", "decode-16-d256", "decode-16-d512", "prefill-16-d256", "prefill-plain")
    problem = replace(pinned(*names, "several-16-d256"), kinds=kinds, max_drafts=3)
    assert [CakeBackend.refuse(problem, phase) for phase in PHASES] == [None, None]
    chosen = {step.choice.variant.name for kind in kinds for step in choose_decodes(problem, kind)}  # type: ignore[union-attr]
    assert chosen == {"decode-16-d256-few", "decode-16-d256", "decode-16-d512"}


def test_names_that_are_unknown_or_of_no_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown variant 'decode-17'; known: .*decode-16-d128, .*decode-plain"):
        check_variants(("decode-17",), "fa,cake")
    for setting in ("auto", "fa", "fa,fi"):
        with pytest.raises(ConfigError, match="decode-plain needs attention_backend 'cake'"):
            check_variants(("decode-plain",), setting)
        check_variants((), setting)
    for setting in ("cake", "cake,cake"):
        check_variants(tuple(variant_names()), setting)


@pytest.mark.parametrize("setting", ["fa,cake", "fa, cake"])
@pytest.mark.parametrize("name", ["prefill-16-d128", "several-16-d128"])
def test_a_pin_for_chunks_is_refused_where_another_backend_computes_them(name: str, setting: str) -> None:
    check_variants(("decode-16-d128",), setting)
    with pytest.raises(ConfigError, match=f"cake_variants: {name} is for prefill, which is not cake's part of "):
        check_variants(("decode-16-d128", name), setting)


def test_a_pin_for_decodes_is_refused_where_another_backend_computes_them() -> None:
    check_variants(("prefill-16-d128", "several-16-d128"), "cake,fi")
    with pytest.raises(ConfigError, match="decode-16-d128 is for decode, which is not cake's part of 'cake,fi'"):
        check_variants(("decode-16-d128",), "cake,fi")


def test_the_setting_stands_in_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "aserve.toml"
    file.write_text('[engine]\nattention_backend = "fa,cake"\ncake_variants = ["decode-16-d128"]\n')
    assert load_config(file).engine.cake_variants == ("decode-16-d128",)


def test_the_tables_are_read_where_there_is_no_triton() -> None:
    """Their names are settings, and `aserve check` shows them everywhere."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import aserve.attention.registry, aserve.kernels.cake.document, aserve.commands.check\n"
        "assert 'decode-plain' in aserve.kernels.cake.tables.variant_names()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
