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
    return select_variant(_variant_problem(problem, kind), _allowed_rows(problem, PREFILL_VARIANTS))


def refuse_prefill(problem: AttentionProblem) -> str | None:
    """Say why no variant, or none of those that are pinned, serves the chunks of ``problem``, or which pin is idle."""
    choices = [choose_prefill(problem, kind) for kind in problem.kinds]
    drafts = [choose_several(problem, kind) for kind in problem.kinds] if problem.max_drafts else []
    return (
        _refuse_unserved(problem, choices)
        or _refuse_idle_pin(problem, PREFILL_VARIANTS, choices)
        or _refuse_idle_pin(problem, SEVERAL_VARIANTS, drafts)
    )


def choose_several(problem: AttentionProblem, kind: AttentionKind) -> Choice[DecodeVariant]:
    """Return the choice for chunks that verify drafts; those that none serves are computed as all chunks."""
    asked = replace(_variant_problem(problem, kind), num_queries=num_draft_queries(problem))
    return select_variant(asked, _allowed_rows(problem, SEVERAL_VARIANTS))


def num_draft_queries(problem: AttentionProblem) -> int:
    """Return the most queries of a chunk that the kernel for drafts takes: a token and what is guessed after it."""
    return min(problem.max_drafts + 1, MAX_QUERIES)


def choose_decodes(problem: AttentionProblem, kind: AttentionKind) -> list[StepChoice]:
    """Return the choices for steps of ever more sequences; the last one is for all that the problem has."""
    limits = {row.max_seqs for row in DECODE_VARIANTS if row.max_seqs is not None}
    choices: list[StepChoice] = []
    for max_seqs in sorted({min(limit, problem.max_num_seqs) for limit in (*limits, problem.max_num_seqs)}):
        asked = replace(_variant_problem(problem, kind), max_seqs=max_seqs)
        choice = select_variant(asked, _allowed_rows(problem, DECODE_VARIANTS))
        if choices and choices[-1].choice.variant == choice.variant:
            choices.pop()
        choices.append(StepChoice(max_seqs, choice))
    return choices


def refuse_decodes(problem: AttentionProblem) -> str | None:
    """Say why no variant, or none of those that are pinned, serves the decodes of ``problem``, or which pin is idle."""
    steps = [choose_decodes(problem, kind) for kind in problem.kinds]
    largest = [steps_of_kind[-1].choice for steps_of_kind in steps]
    all_choices = [step.choice for steps_of_kind in steps for step in steps_of_kind]
    return _refuse_unserved(problem, largest) or _refuse_idle_pin(problem, DECODE_VARIANTS, all_choices)


def _allowed_rows(problem: AttentionProblem, table: tuple[V, ...]) -> tuple[V, ...]:
    """Return the rows of ``table`` that are pinned, all if none is, with the launches for the problem's GPU."""
    rows = tune_rows(table, problem.gpu_name, problem.capability)
    return tuple(row for row in rows if row.name in problem.cake_variants) or rows


def _refuse_unserved(problem: AttentionProblem, choices: list[Choice[V]]) -> str | None:
    for choice in choices:
        if choice.variant is None:
            name, reason = list(choice.refusals.items())[-1]  # of the one that serves most
            return f"{name} is pinned: {reason}" if name in problem.cake_variants else reason
    return None


def _refuse_idle_pin(problem: AttentionProblem, table: tuple[V, ...], choices: list[Choice[V]]) -> str | None:
    """Say why a row of ``table`` that is pinned is taken by none of ``choices``, which are all that there are of it."""
    pinned = [row.name for row in table if row.name in problem.cake_variants]
    taken = [choice.variant.name for choice in choices if choice.variant is not None]
    idle = next((name for name in pinned if name not in taken), None)
    if idle is None:
        return None
    if not choices:
        return f"{idle} is pinned: it verifies drafts, of which there are none without speculation"
    reasons = [choice.refusals[idle] for choice in choices if idle in choice.refusals]
    reason = reasons[-1] if reasons else f"layers are served by rows before it, {', '.join(dict.fromkeys(taken))}"
    return f"{idle} is pinned: {reason}"


def _variant_problem(problem: AttentionProblem, kind: AttentionKind) -> VariantProblem:
    return VariantProblem(
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        head_dim=kind.head_dim,
        group=kind.num_heads // kind.num_kv_heads,
        capability=problem.capability,
        return_lse=problem.needs_lse,
        max_keys=min(kind.sliding_window or problem.max_model_len, problem.max_model_len),
        max_seqs=problem.max_num_seqs,
    )
