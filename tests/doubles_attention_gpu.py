"""What the GPU's checks of attention share: the settings that work on this machine, and a graph over its own pool."""

import dataclasses
from collections.abc import Sequence

import torch
from doubles_attention import CapturedCase, PagedCase, check_attention
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionProblem, AttentionSpec, CaptureShape, LayerKV
from aserve.attention.merge import convert_lse
from aserve.attention.registry import BACKENDS, resolve_backend
from aserve.kernels.nvfp4 import NVFP4, BlockScales

CUDA = torch.device("cuda")


def build(
    setting: str,
    case: PagedCase,
    *specs: AttentionSpec,
    max_num_seqs: int = 64,
    max_num_tokens: int = 4096,
    max_drafts: int = 0,
) -> AttentionBackend:
    problem = AttentionProblem(
        "cuda",
        case.q.dtype,
        case.layer_kv.key.dtype if case.layer_kv.block_scales is None else NVFP4,
        case.batch.page_size,
        tuple(spec.kind for spec in specs),
        torch.cuda.get_device_capability(),
        gpu_name=torch.cuda.get_device_name(),
        max_drafts=max_drafts,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
    )
    return resolve_backend(setting, problem, CUDA)


def usable_settings(problem: AttentionProblem) -> list[str]:
    """Names and pairs that this machine and ``problem`` allow; torch alone is left to its own tests."""
    names = [name for name, refusal in BACKENDS.refusals().items() if refusal is None and name != "cpu"]
    settings = []
    for setting in [*names, *(f"{one},{two}" for one in names for two in names if one != two)]:
        parts = setting.split(",")
        phases = (("prefill",), ("decode",)) if len(parts) == 2 else (("prefill", "decode"),)
        refusals = [
            BACKENDS.load(name).refuse(problem, phase)  # type: ignore[arg-type]
            for name, served in zip(parts, phases, strict=True)
            for phase in served
        ]
        if not any(refusals) and setting != "torch":
            settings.append(setting)
    return settings


def settings_here() -> list[str]:
    """The usable settings for 32 heads and 8 KV heads of 128 in bfloat16."""
    if not torch.cuda.is_available():
        return ["fi"]  # collected, not run
    from doubles_attention import make_spec

    kind = make_spec(32, 8, 128).kind
    bf16 = torch.bfloat16
    return usable_settings(AttentionProblem("cuda", bf16, bf16, 16, (kind,), torch.cuda.get_device_capability()))


def has_lse(setting: str) -> bool:
    """XQA leaves none."""
    return "trtllm" not in setting


def check(
    output: Tensor, lse: Tensor | None, case: PagedCase, spec: AttentionSpec, backend: AttentionBackend
) -> tuple[float, float]:
    """Hold the first tokens, those of ``case``, against dense attention; return the largest errors."""
    num_tokens = sum(case.batch.query_lens)
    natural = None if lse is None else convert_lse(lse[:num_tokens], backend.lse_base, "e")
    return check_attention(output[:num_tokens], natural, case, spec)


def run_eagerly(setting: str, case: PagedCase, spec: AttentionSpec) -> tuple[float, float]:
    backend = build(setting, case, spec)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=has_lse(setting))
    return check(output, lse, case, spec, backend)


def _parts(layer_kv: LayerKV) -> list[Tensor]:
    blocks = layer_kv.block_scales
    return [layer_kv.key, layer_kv.value, *(() if blocks is None else (blocks.key, blocks.value))]


class CapturedRun:
    """A graph of ``shape`` over a pool of its own, whose last page is the dummy one."""

    def __init__(
        self,
        backend: AttentionBackend,
        shape: CaptureShape,
        cases: Sequence[PagedCase],
        spec: AttentionSpec,
        *,
        return_lse: bool,
    ) -> None:
        """``cases`` are those that will be replayed: they say how wide the table and how large the pool must be."""
        first = cases[0]
        width = max(case.batch.page_table.shape[1] for case in cases) + 3
        self.num_pages = max(len(case.layer_kv.key) for case in cases)
        self._backend, self._spec, self._shape = backend, spec, shape
        self._captured = CapturedCase.make(shape, width, first.batch.page_size, "cuda")
        key, value, *blocks = (part.new_zeros(self.num_pages + 1, *part.shape[1:]) for part in _parts(first.layer_kv))
        scales = BlockScales(*blocks) if blocks else None
        self._layer_kv = dataclasses.replace(first.layer_kv, key=key, value=value, block_scales=scales)
        self._q = first.q.new_zeros(shape.num_tokens, spec.num_heads, spec.head_dim)
        self._return_lse = return_lse
        self.out = torch.zeros_like(self._q)
        self.lse: Tensor | None = None
        self.plan = backend.prepare_capture(shape, self._captured.tables)
        backend.prepare_replay(self.plan, self._captured.fill(first, self.num_pages))
        self._forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._forward()

    def _forward(self) -> None:
        self._backend.convert(self.plan)
        _, self.lse = self._backend.forward(
            self._q, self._layer_kv, self.plan, self._spec, return_lse=self._return_lse, out=self.out
        )

    def stage(self, case: PagedCase) -> None:
        """Put the step of ``case`` where the graph reads, with NaN in all outputs, and plan it."""
        self.out.fill_(torch.nan)
        for pool, part in zip(_parts(self._layer_kv), _parts(case.layer_kv), strict=True):
            pool[: len(part)] = part
        self._q.fill_(0.5)
        self._q[: len(case.q)] = case.q
        lens = self._captured.fill(case, self.num_pages)
        self._backend.prepare_replay(self.plan, lens)

    def replay(self, case: PagedCase) -> tuple[float, float]:
        """Run the step of ``case`` and compare with dense attention."""
        self.stage(case)
        self._graph.replay()
        return check(self.out, self.lse, case, self._spec, self._backend)
