"""From a loaded model to a runner on a CUDA device: what is allocated, in which order, and how much each part takes."""

import gc
from collections.abc import Set

import torch

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.runner.assemble import with_pool
from aserve.runner.cuda.body import Body
from aserve.runner.cuda.cuda_runner import CudaRunner
from aserve.runner.cuda.device_state import DeviceState, StateSizes
from aserve.runner.cuda.graphs import Graphs, GraphSizes
from aserve.runner.cuda.head import Head
from aserve.runner.cuda.sizes import MAX_CHUNKS, exact_shape
from aserve.runner.cuda.staging import Staging
from aserve.runner.cuda.step_arrays import ArrayLayout
from aserve.runner.cuda.streams import UploadSlots
from aserve.runner.executor import DeviceParts
from aserve.runner.kv_pool import GIB, KVLayout
from aserve.runner.prompt_scores import MAX_LOGIT_ROWS, PromptScores
from aserve.runner.resolve import log_choice, resolve_max_num_drafts
from aserve.runner.transfer import Transfer
from aserve.runner.warm_up import dummy_plan
from aserve.sampling.gpu.token_picker import TokenPicker
from aserve.sampling.sampler import Sampler
from aserve.scheduler.limits import Limits
from aserve.structured.compile import GrammarCompiler

SPARE_WORDS = 1 << 18  # room for new pages and prompts in an upload slot; a step that needs more gets a larger one
FULL_SAMPLING_COPIES = 8  # of the logits, while all rows have penalties and report log probabilities
SCORING_COPIES = 3  # of the logits of prompt tokens, these included, while their log probabilities are found
MIN_GRAPH_BYTES = 1 << 20
MARGIN_BYTES = 256 << 20  # fragmentation, and libraries that allocate beside torch


class CudaAssembly:
    """Everything of a runner but the KV pool and the graphs, whose sizes depend on what is left."""

    def __init__(
        self, config: EngineConfig, parts: DeviceParts, eos_token_ids: Set[int], compiler: GrammarCompiler | None
    ) -> None:
        """``parts`` come with a pool of no pages but the dummy ones."""
        self._config = config
        self._parts = parts
        shape = parts.model.config
        self._max_num_drafts = resolve_max_num_drafts(config, parts.max_num_seqs)
        layout = ArrayLayout(parts.max_num_seqs, self._max_num_drafts)
        sizes = StateSizes(
            max_num_seqs=parts.max_num_seqs,
            max_num_drafts=self._max_num_drafts,
            max_model_len=parts.max_model_len,
            max_num_tokens=parts.max_num_tokens,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            page_size=parts.page_size,
        )
        self._upload = Transfer(parts.device).upload
        self._compute = torch.cuda.Stream(parts.device, priority=-1)
        self._state = DeviceState(sizes, layout, parts.backend.problem.dtype, parts.device)
        picker = TokenPicker(len(self._state.logits), shape.vocab_size, parts.device)
        self._sampler = Sampler(
            parts.max_num_seqs + 1, shape.vocab_size, eos_token_ids, parts.device, self._upload, picker, compiler
        )
        slots = UploadSlots(layout, SPARE_WORDS, parts.device, self._compute)
        self._staging = Staging(slots, layout, self._state, self._sampler, parts.backend.decode_order)
        self._sampler.reserve()
        self._head = Head(parts.model, self._state, picker)
        self._sizes = GraphSizes.choose(
            parts.backend,
            parts.max_num_seqs,
            parts.max_num_tokens,
            max_num_drafts=self._max_num_drafts,
            enabled=config.cuda_graphs,
        )

    @torch.inference_mode()
    def measure(self) -> int:
        """Return the bytes that steps and graphs will take beside what is allocated now; tries the largest of each."""
        self._state.point_at(self._parts.num_pages)
        body = Body(self._parts, self._state)
        free_before = _free_bytes()
        with torch.cuda.stream(self._compute):
            self._run_largest(body)
            pool = torch.cuda.graph_pool_handle()
            largest, smallest = self._sizes.extremes()
            graphs = [Graphs(sizes, pool) for sizes in (largest, smallest)]
            graphs[0].capture(body, self._head, self._staging, show_progress=False)
            free_first = _free_bytes()
            graphs[1].capture(body, self._head, self._staging, show_progress=False)
            free_last = _free_bytes()
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        per_graph = max(MIN_GRAPH_BYTES, (free_first - free_last) // max(1, smallest.count))
        sampling = sampling_bytes(*self._state.logits.shape)
        needed = free_before - free_first + per_graph * self._sizes.count + sampling + MARGIN_BYTES
        log_choice("reserved_gib", f"{needed / GIB:.2f}", f"steps, {self._sizes.count} graphs, sampling")
        return needed

    def _run_largest(self, body: Body) -> None:
        """Run the largest step without a graph, as one that fits into none would be."""
        num_tokens, most = self._parts.max_num_tokens, self._parts.max_model_len
        spans = [min(most, num_tokens - start) for start in range(0, num_tokens, most)]
        spans = spans[: min(self._parts.max_num_seqs, MAX_CHUNKS)]
        plan = dummy_plan(self._parts.max_num_seqs, [(0, span) for span in spans])
        plan.num_decodes = 0
        shape, most_sampled = exact_shape(plan), len(self._state.logits)
        body.run_eagerly(plan, shape, self._staging.send(plan, shape, most_sampled).lens)
        self._head.score_and_sample(most_sampled)
        self._sampler.warm_up(self._state.logits)

    @torch.inference_mode()
    def finish(self, parts: DeviceParts) -> CudaRunner:
        """Capture the graphs over the pool of ``parts`` and return the runner."""
        self._state.point_at(parts.num_pages)
        self._compute.wait_stream(torch.cuda.current_stream())  # which makes the pages zero, for tens of milliseconds
        body, graphs = Body(parts, self._state), Graphs(self._sizes, torch.cuda.graph_pool_handle())
        with torch.cuda.stream(self._compute):
            graphs.capture(body, self._head, self._staging, show_progress=True)
            self._compute.synchronize()
        log_choice(
            "cuda_graphs",
            self._sizes.count,
            f"{len(self._sizes.decodes)} batches up to {max(self._sizes.decodes, default=0)}, "
            f"{len(self._sizes.tokens)} mixed steps up to {max(self._sizes.tokens, default=0)} tokens, heads for both",
        )
        limits = Limits(
            vocab_size=parts.model.config.vocab_size,
            max_model_len=parts.max_model_len,
            max_num_seqs=parts.max_num_seqs,
            max_num_batched_tokens=parts.max_num_tokens,
            num_pages=parts.num_pages,
            page_size=parts.page_size,
            max_num_chunks=MAX_CHUNKS,
            max_num_drafts=self._max_num_drafts,
        )
        return CudaRunner(
            limits,
            state=self._state,
            staging=self._staging,
            body=body,
            head=self._head,
            graphs=graphs,
            sampler=self._sampler,
            prompt_scores=PromptScores(parts.model, self._state.token_pool),
            upload=self._upload,
            compute=self._compute,
        )


def build_cuda_runner(
    config: EngineConfig,
    parts: DeviceParts,
    layout: KVLayout,
    eos_token_ids: Set[int],
    compiler: GrammarCompiler | None = None,
) -> CudaRunner:
    """Size the KV pool after everything else and capture the graphs; ``parts`` have no pages but the dummy ones yet.

    Raises ConfigError naming needed and free memory if the GPU has too little.
    """
    try:
        assembly = CudaAssembly(config, parts, eos_token_ids, compiler)
        return assembly.finish(with_pool(config, parts, layout, assembly.measure()))
    except RuntimeError as error:  # what is not torch's own allocation has no class of its own for this
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
            raise
        free_bytes, total_bytes = torch.cuda.mem_get_info(parts.device)
        raise ConfigError(
            f"out of GPU memory while starting: {free_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB are free; lower "
            "kv_memory_fraction (kv_memory_gib or num_pages, if one is set), max_num_seqs or max_num_batched_tokens "
            f"({error})"
        ) from error


def sampling_bytes(max_num_sampled: int, vocab_size: int) -> int:
    """Return what a step allocates at most to sample any rows, or to score prompts, beside its own logits."""
    num_rows = max(FULL_SAMPLING_COPIES * max_num_sampled, SCORING_COPIES * MAX_LOGIT_ROWS)
    return num_rows * vocab_size * torch.float32.itemsize


def _free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
