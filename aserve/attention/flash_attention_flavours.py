"""The three lines of FlashAttention that read paged keys, and what each can do where."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from aserve.attention.base import AttentionProblem, AttentionSpec, LayerKV, Phase, capability_name
from aserve.attention.installed import has_flash_attention
from aserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """Attention of N sequences whose T queries stand one after another."""

    q: Tensor  # [T, H, D]
    out: Tensor  # [T, H, D]
    layer_kv: LayerKV
    spec: AttentionSpec
    cu_query_lens: Tensor  # [N + 1] int32; need not begin with 0
    key_lens: Tensor  # [N] int32
    cu_key_lens: Tensor | None  # [N + 1] int32; None in a captured call
    page_table: Tensor  # [N, P] int32
    max_query_len: int
    max_key_len: int
    return_lse: bool

    @property
    def window(self) -> tuple[int, int]:
        """Keys seen before and after a query's own; -1 for all."""
        window = self.spec.sliding_window
        return (-1, -1) if window is None else (window - 1, 0)


class FlashAttentionFlavour:
    """One of the libraries. All compute in float16 and bfloat16 and return natural log-sum-exps."""

    name: ClassVar[str]
    module: ClassVar[str]
    can_be_captured: ClassVar[bool] = False
    """Whether a graph may hold a call: addresses and host arguments the same for all lengths, output in place."""

    def __init__(self, problem: AttentionProblem) -> None:
        """Load the library; raises ConfigError if that fails."""
        self._problem = problem
        try:
            self._library: Any = import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(f"{self.name} is installed but cannot be loaded: {error}") from error

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        """Say why it cannot serve ``phase`` of ``problem``."""
        raise NotImplementedError

    def attend(self, call: RaggedCall) -> Tensor | None:
        """Write ``call.out``; return the LSE [H, T] float32 if asked for."""
        raise NotImplementedError


class FlashAttention4(FlashAttentionFlavour):
    """CuTe kernels, compiled at the first call of a kind. On Hopper they do not split keys between thread blocks."""

    name = "flash-attn-4"
    module = "flash_attn.cute.interface"
    can_be_captured = True

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        major = problem.capability[0]
        if major not in (9, 10, 11):
            return (
                f"flash-attn-4 reads no paged keys on a GPU of compute capability {capability_name(problem.capability)}"
            )
        for head_dim in {kind.head_dim for kind in problem.kinds}:
            if head_dim % 8 or head_dim > 256 or (major > 9 and 128 < head_dim < 256):
                return f"flash-attn-4 does not know head_dim {head_dim} on this GPU"
        if phase == "decode" and major == 9:
            return "flash-attn-4 has no split-KV on Hopper, so that small batches of decodes leave most of the GPU idle"
        return None

    def attend(self, call: RaggedCall) -> Tensor | None:
        spec = call.spec
        left, right = call.window
        num_splits = 1 if self._problem.capability[0] == 9 else 0  # 0: as its heuristic says
        _, lse, *_ = self._library._flash_attn_fwd(  # the public function has no place for the output
            call.q,
            call.layer_kv.key,
            call.layer_kv.value,
            cu_seqlens_q=call.cu_query_lens,
            seqused_k=call.key_lens,
            page_table=call.page_table,
            softmax_scale=spec.scale,
            causal=True,
            softcap=spec.softcap,
            window_size_left=None if left < 0 else left,
            window_size_right=None if right < 0 else right,
            learnable_sink=spec.sinks,
            num_splits=num_splits,
            return_lse=call.return_lse,
            out=call.out,
        )
        return lse if call.return_lse else None


class FlashAttention3(FlashAttentionFlavour):
    """Hopper's own kernels, which split keys and read pages of any size."""

    name = "flash-attn 3"
    module = "flash_attn_interface"

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if problem.capability[0] != 9:
            return f"flash-attn 3 is for Hopper, not for compute capability {capability_name(problem.capability)}"
        return _refuse_common(cls.name, problem)

    def attend(self, call: RaggedCall) -> Tensor | None:
        output, lse, *_ = self._library.flash_attn_with_kvcache(
            call.q,
            call.layer_kv.key,
            call.layer_kv.value,
            cache_seqlens=call.key_lens,
            page_table=call.page_table,
            cu_seqlens_q=call.cu_query_lens,
            max_seqlen_q=call.max_query_len,
            softmax_scale=call.spec.scale,
            causal=True,
            window_size=call.window,
            softcap=call.spec.softcap or 0.0,
            return_softmax_lse=True,
        )
        call.out.copy_(output)
        return lse if call.return_lse else None


class FlashAttention2(FlashAttentionFlavour):
    """The line for all GPUs since Ampere; its pages hold a multiple of 256 tokens."""

    name = "flash-attn 2"
    module = "flash_attn.flash_attn_interface"

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if problem.capability < (8, 0):
            return f"flash-attn 2 needs compute capability 8.0 or more, not {capability_name(problem.capability)}"
        if problem.page_size % 256:
            return f"flash-attn 2 needs a page_size that is a multiple of 256, not {problem.page_size}"
        return _refuse_common(cls.name, problem)

    def attend(self, call: RaggedCall) -> Tensor | None:
        output, lse, *_ = self._library.flash_attn_varlen_func(
            call.q,
            call.layer_kv.key,
            call.layer_kv.value,
            cu_seqlens_q=call.cu_query_lens,
            cu_seqlens_k=call.cu_key_lens,
            max_seqlen_q=call.max_query_len,
            max_seqlen_k=call.max_key_len,
            softmax_scale=call.spec.scale,
            causal=True,
            window_size=call.window,
            softcap=call.spec.softcap or 0.0,
            return_attn_probs=True,  # and the LSE
            block_table=call.page_table,
        )
        call.out.copy_(output)
        return lse if call.return_lse else None


FLAVOURS: tuple[type[FlashAttentionFlavour], ...] = (FlashAttention4, FlashAttention3, FlashAttention2)  # best first


def choose_flavour(problem: AttentionProblem, phase: Phase) -> type[FlashAttentionFlavour] | str:
    """Return the best flavour that is installed and serves ``phase`` of ``problem``, or why there is none."""
    refusals = []
    for flavour in FLAVOURS:
        if not has_flash_attention(flavour.name):
            continue
        reason = flavour.refuse(problem, phase)
        if reason is None:
            return flavour
        refusals.append(reason)
    return "; ".join(refusals) or "no flash-attn is installed"


def _refuse_common(name: str, problem: AttentionProblem) -> str | None:
    if any(kind.has_sinks for kind in problem.kinds):
        return f"{name} has no attention sinks"
    for head_dim in {kind.head_dim for kind in problem.kinds}:
        if head_dim % 8 or head_dim > 256:
            return f"{name} knows head_dim up to 256 in steps of 8, not {head_dim}"
    return None
