"""Which variants of the cake family serve a model's layers on a GPU, and why the faster ones do not."""

from dataclasses import dataclass, replace

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, MAX_QUERIES, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS, PrefillVariant
from aserve.kernels.cake.select_variant import Choice, V, VariantProblem, select_variant
from aserve.kernels.cake.tuned_launches import tune_rows


@dataclass(frozen=True, slots=True)
class StepChoice:
    """What serves the steps of up to ``max_seqs`` sequences for which no choice before it does."""

    max_seqs: int
    choice: Choice[DecodeVariant]

    def describe(self, kind: AttentionKind) -> str:
        """Say which variant it is, for what, and why none of the faster ones."""
        return describe_choice(self.choice, f"head_dim {kind.head_dim}, up to {self.max_seqs} sequences")


def describe_choice(choice: Choice[V], served: str) -> str:
    """Say which variant is for what is ``served``, and why none of the faster ones."""
    name = "no variant" if choice.variant is None else choice.variant.name
    names: dict[str, list[str]] = {}  # by their reason
    for other, reason in choice.refusals.items():
        names.setdefault(reason, []).append(other)
    passed_over = "; ".join(f"{', '.join(others)}: {reason}" for reason, others in names.items())
    return f"{name} for {served} ({passed_over or 'the first row'})"


def choose_prefill(problem: AttentionProblem, kind: AttentionKind) -> Choice[PrefillVariant]:
    """Return the choice for the chunks of all steps."""
    rows = tune_rows(PREFILL_VARIANTS, problem.gpu_name, problem.capability)
    pinned = tuple(row for row in rows if row.name in problem.cake_variants)
    return select_variant(_variant_problem(problem, kind, problem.max_num_seqs), pinned or rows)


def refuse_prefill(problem: AttentionProblem) -> str | None:
    """Say why no variant, or none of those that are pinned, serves the chunks of ``problem``."""
    choices = (choose_prefill(problem, kind) for kind in problem.kinds)
    return next((reason for choice in choices if (reason := _refuse(problem, choice))), None)


def choose_several(problem: AttentionProblem, kind: AttentionKind) -> Choice[DecodeVariant]:
    """Return the choice for chunks that verify drafts; those that none serves are computed as all chunks."""
    rows = tune_rows(SEVERAL_VARIANTS, problem.gpu_name, problem.capability)
    pinned = tuple(row for row in rows if row.name in problem.cake_variants)
    asked = replace(_variant_problem(problem, kind, problem.max_num_seqs), num_queries=num_draft_queries(problem))
    return select_variant(asked, pinned or rows)


def num_draft_queries(problem: AttentionProblem) -> int:
    """Return the most queries of a chunk that the kernel for drafts takes: a token and what is guessed after it."""
    return min(problem.max_drafts + 1, MAX_QUERIES)


def choose_decodes(problem: AttentionProblem, kind: AttentionKind) -> list[StepChoice]:
    """Return the choices for steps of ever more sequences; the last one is for all that the problem has."""
    rows = tune_rows(DECODE_VARIANTS, problem.gpu_name, problem.capability)
    pinned = tuple(row for row in rows if row.name in problem.cake_variants)
    limits = {row.max_seqs for row in rows if row.max_seqs is not None and row.max_seqs < problem.max_num_seqs}
    choices: list[StepChoice] = []
    for max_seqs in sorted({*limits, problem.max_num_seqs}):
        choice = select_variant(_variant_problem(problem, kind, max_seqs), pinned or rows)
        if choices and choices[-1].choice.variant == choice.variant:
            choices.pop()
        choices.append(StepChoice(max_seqs, choice))
    return choices


def refuse_decodes(problem: AttentionProblem) -> str | None:
    """Say why no variant, or none of those that are pinned, serves the decodes of ``problem``."""
    choices = (choose_decodes(problem, kind)[-1].choice for kind in problem.kinds)
    return next((reason for choice in choices if (reason := _refuse(problem, choice))), None)


def _refuse(problem: AttentionProblem, choice: Choice[V]) -> str | None:
    if choice.variant is not None:
        return None
    name, reason = list(choice.refusals.items())[-1]  # of the one that serves most
    return f"{name} is pinned: {reason}" if name in problem.cake_variants else reason


def _variant_problem(problem: AttentionProblem, kind: AttentionKind, max_seqs: int) -> VariantProblem:
    return VariantProblem(
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        head_dim=kind.head_dim,
        group=kind.num_heads // kind.num_kv_heads,
        capability=problem.capability,
        return_lse=problem.needs_lse,
        max_keys=min(kind.sliding_window or problem.max_model_len, problem.max_model_len),
        max_seqs=max_seqs,
    )
