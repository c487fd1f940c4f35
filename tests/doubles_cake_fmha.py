"""FlashInfer's cake decode and the selector of its routes, played on the CPU, with the parameters that they have."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from doubles_paged_kernels import attend_ragged
from torch import Tensor

# As flashinfer-python 0.7.4 declares them: names in order, "name=" for those with a default, "*" before keyword-only.
DECODE_PARAMETERS = """
    query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale= bmm2_scale= window_left= out=
    out_dtype= o_sf_scale= o_sf_vec_size= sinks= kv_layout= enable_pdl= backend= q_len_per_req= o_scale= mask=
    max_q_len= cum_seq_lens_q= skip_softmax_threshold_scale_factor= kv_cache_sf= uses_shared_paged_kv_idx= lse=
    return_lse= bmm1_scale_log2= multi_ctas_kv_counter_buffer= enable_block_sparse_attention= cp_world= cp_rank=
    causal_seqlens_kv_global= bf16q_fp8kv_transform_mode= request_order= request_order_plan= sparse_top_k=
    length_aware_schedule=
"""
ROUTE_PARAMETERS = """
    device * query key_cache value_cache out workspace_buffer block_tables seq_lens batch_size q_len max_seq_len
    window_left bmm1_scale bmm2_scale o_scale sinks kv_layout uses_shared_paged_kv_idx cum_seq_lens_q key_block_scales
    value_block_scales skip_softmax_threshold_scale_factor enable_block_sparse_attention lse=
    multi_ctas_kv_counter_buffer= enable_pdl= length_aware_schedule=
"""
MAX_GROUP = 8  # of all routes
COUNTER_BYTES_A_HEAD = 4


def signature_of(parameters: str) -> inspect.Signature:
    """The signature that one of the texts above stands for."""
    kind, found = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for name in parameters.split():
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        default = None if name.endswith("=") else inspect.Parameter.empty
        found.append(inspect.Parameter(name.rstrip("="), kind, default=default))
    return inspect.Signature(found)


def bound(parameters: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse, as Python would, arguments that the real function does not take or that it lacks."""
    signature = signature_of(parameters)

    def checked(*values: Any, **named: Any) -> Any:
        signature.bind(*values, **named)
        return call(*values, **named)

    return checked


class PlayedCakeFmha:
    """Both functions; notes what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.decode = bound(DECODE_PARAMETERS, self._decode)
        self.select_route = bound(ROUTE_PARAMETERS, self._select_route)

    def _decode(self, **options: Any) -> None:
        self.calls.append(options)
        assert options["backend"] == "cake"
        assert options["kv_layout"] == "HND"
        query, (keys, values), out = options["query"], options["kv_cache"], options["out"]
        num_seqs, num_heads, head_dim = query.shape
        assert query.is_contiguous()
        assert out.shape == query.shape
        assert head_dim in (128, 256), "the compatibility kernel knows no others"
        table, lens = options["block_tables"], options["seq_lens"]
        assert table.is_contiguous()
        assert lens.is_contiguous()
        assert (table.dtype, lens.dtype) == (torch.int32, torch.int32)
        assert len(table) == len(lens) == num_seqs
        assert int(lens.max()) <= options["max_seq_len"] <= table.shape[1] * keys.shape[2]
        counters = options["multi_ctas_kv_counter_buffer"]
        assert counters.numel() >= COUNTER_BYTES_A_HEAD * num_seqs * num_heads
        assert not counters.any(), "zeros, which kernels leave as zeros"
        assert isinstance(options["bmm1_scale"], float)
        assert isinstance(options["bmm2_scale"], float)
        _, lse = attend_ragged(
            query,
            (keys.transpose(1, 2), values.transpose(1, 2)),
            torch.arange(num_seqs + 1),
            lens,
            table,
            scale=options["bmm1_scale"],
            window=(options["window_left"], 0),
            sinks=options["sinks"],
            out=out,
        )
        out.mul_(options["bmm2_scale"])
        if options["lse"] is not None:
            options["lse"].copy_(lse.T / torch.tensor(2.0).log())

    def _select_route(self, device: torch.device, **options: Any) -> Any:
        """Return what FlashInfer would for bfloat16, roughly: aligned, native, or nothing."""
        self.asked.append(options)
        query: Tensor = options["query"]
        keys: Tensor = options["key_cache"]
        group = query.shape[1] // keys.shape[1]
        if group > MAX_GROUP or query.shape[2] != 128:
            return None
        is_aligned = group == MAX_GROUP and keys.is_contiguous() and options["lse"] is None
        if is_aligned:
            return SimpleNamespace(component="decode_aligned_bf16", aligned_program="ALIGNED_C8_BF16", program=None)
        return SimpleNamespace(component="decode_native_bf16", aligned_program=None, program=None)
