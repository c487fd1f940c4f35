"""The public functions of FlashAttention's three lines and of flashinfer's TensorRT-LLM kernels, played on the CPU.

They take the arguments that the libraries document and compute from them alone.
"""

from typing import Any

import torch
from torch import Tensor


def attend_ragged(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    cu_query_lens: Tensor,
    key_lens: Tensor,
    page_table: Tensor,
    *,
    scale: float,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and natural LSE [H, T]; rows outside of ``cu_query_lens`` stay as they are."""
    out = torch.full_like(q, torch.nan) if out is None else out
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    group = q.shape[1] // pools[0].shape[2]
    left = window[0]
    for i, key_len in enumerate(key_lens.tolist()):
        start, stop = int(cu_query_lens[i]), int(cu_query_lens[i + 1])
        pages = page_table[i, : -(-key_len // pools[0].shape[1])].long()
        keys, values = (pool[pages].flatten(0, 1)[:key_len].double().repeat_interleave(group, 1) for pool in pools)
        for row in range(start, stop):
            position = key_len - (stop - row)
            first = 0 if left is None or left < 0 else max(0, position - left)
            scores = torch.einsum("hd,khd->hk", q[row].double(), keys[first : position + 1]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum(-1)
            if sinks is not None:
                total = total + sinks.double().exp()
            weights = scores.exp() / total.unsqueeze(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values[first : position + 1]).to(q.dtype)
            lse[:, row] = total.log().float()
    return out, lse


class PlayedFlashAttention:
    """Stands in for the module of any of the three lines and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def _flash_attn_fwd(self, q: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Any, ...]:
        self.calls.append(options)
        assert options["causal"]
        out, lse = attend_ragged(
            q,
            (key, value),
            options["cu_seqlens_q"],
            options["seqused_k"],
            options["page_table"],
            scale=options["softmax_scale"],
            window=(options["window_size_left"], options["window_size_right"]),
            softcap=options["softcap"],
            sinks=options["learnable_sink"],
            out=options["out"],
        )
        return out, lse if options["return_lse"] else None, None, None, None

    def flash_attn_with_kvcache(self, q: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        self.calls.append(options)
        assert options["causal"]
        assert options["return_softmax_lse"]
        lens = options["cu_seqlens_q"].diff()
        assert options["max_seqlen_q"] == int(lens.max())
        return attend_ragged(
            q,
            (key, value),
            options["cu_seqlens_q"],
            options["cache_seqlens"],
            options["page_table"],
            scale=options["softmax_scale"],
            window=options["window_size"],
            softcap=options["softcap"],
        )

    def flash_attn_varlen_func(self, q: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        self.calls.append(options)
        assert options["causal"]
        assert options["return_attn_probs"]
        assert key.shape[1] % 256 == 0
        key_lens = options["cu_seqlens_k"].diff()
        assert options["max_seqlen_q"] == int(options["cu_seqlens_q"].diff().max())
        assert options["max_seqlen_k"] == int(key_lens.max())
        out, lse = attend_ragged(
            q,
            (key, value),
            options["cu_seqlens_q"],
            key_lens,
            options["block_table"],
            scale=options["softmax_scale"],
            window=options["window_size"],
            softcap=options["softcap"],
        )
        return out, lse, torch.empty(0)


class PlayedTrtllm:
    """The two entry points; notes what they are called with. ``is_xqa``: lengths are unsigned, no LSE is left."""

    def __init__(self, *, is_xqa: bool) -> None:
        self.decodes: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []
        self._is_xqa = is_xqa

    def decode(self, **options: Any) -> None:
        self.decodes.append(options)
        num_seqs = len(options["query"])
        page_size = options["kv_cache"][0].shape[1]
        assert options["max_seq_len"] <= options["block_tables"].shape[1] * page_size
        self._attend(options, torch.arange(num_seqs + 1))

    def prefill(self, **options: Any) -> None:
        self.chunks.append(options)
        lens, key_lens = options["cum_seq_lens_q"].diff(), options["cum_seq_lens_kv"].diff()
        assert key_lens.tolist() == options["seq_lens"].tolist()
        assert options["batch_size"] == len(lens)
        assert (options["max_q_len"], options["max_kv_len"]) == (int(lens.max()), int(key_lens.max()))
        self._attend(options, options["cum_seq_lens_q"])

    def _attend(self, options: dict[str, Any], cu_query_lens: Tensor) -> None:
        assert options["kv_layout"] == "NHD"
        assert options["query"].is_contiguous()
        assert options["block_tables"].is_contiguous()
        assert isinstance(options["bmm1_scale"], float)
        assert isinstance(options["bmm2_scale"], float)
        seq_lens = options["seq_lens"]
        assert seq_lens.dtype == (torch.uint32 if self._is_xqa else torch.int32)
        _, lse = attend_ragged(
            options["query"],
            options["kv_cache"],
            cu_query_lens,
            seq_lens.view(torch.int32),
            options["block_tables"],
            scale=options["bmm1_scale"],
            window=(options["window_left"], 0),
            sinks=options["sinks"],
            out=options["out"],
        )
        options["out"].mul_(options["bmm2_scale"])
        if "lse" in options:
            assert not self._is_xqa
            options["lse"].copy_(lse.T / torch.tensor(2.0).log())
