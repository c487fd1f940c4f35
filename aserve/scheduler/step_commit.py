"""Turns what a step sampled into deltas: tokens join their sequences, drafts are judged, and some sequences end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress, count

from aserve.request import FinishReason
from aserve.scheduler.delta import SequenceDelta, join_deltas
from aserve.scheduler.memory import SequenceMemory
from aserve.scheduler.plan import StepTokens
from aserve.scheduler.planner import Flight, StepPlanner
from aserve.scheduler.sequence import Sequence, Status


@dataclass(slots=True)
class StepCommit:
    """One step's commit, made for it alone; what has ended since the launch gets nothing more."""

    flight: Flight
    tokens: StepTokens
    memory: SequenceMemory
    planner: StepPlanner
    end: Callable[[Sequence, FinishReason], None]  # called with each sequence that ends with one of the tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def run(self) -> list[SequenceDelta]:
        """Return what is new for each sequence that got any of the tokens."""
        self._take_chunks()
        return self._append_tokens()

    def _take_chunks(self) -> None:
        """Collect prompt logprobs, and publish the prompts that are complete."""
        plan, sequences, tokens = self.flight.plan, self.flight.sequences, self.tokens
        first_chunk = len(plan.rows) - plan.num_chunks
        sampled_place = plan.num_sampled - sum(plan.is_sampled[first_chunk:]) - 1
        for place in range(first_chunk, len(plan.rows)):
            seq, is_complete = sequences[place], plan.is_sampled[place]
            sampled_place += is_complete
            if seq.status is Status.FINISHED:
                continue
            if seq.prompt_logprobs is not None and tokens.prompt_logprobs is not None:
                seq.prompt_logprobs += tokens.prompt_logprobs.get(place, ())
            if is_complete and sampled_place not in tokens.errors:
                self.memory.publish(seq)

    def _append_tokens(self) -> list[SequenceDelta]:
        """Append what was sampled to each sequence, unless that has ended since the launch."""
        plan, sequences = self.flight.plan, self.flight.sequences
        deltas: list[SequenceDelta] = []
        place = plan.num_decodes
        self._append_singles(sequences[:place], 0, deltas)
        for seq, drafts in zip(sequences[place:], plan.drafts, strict=False):
            self._append_drafts(seq, drafts, place, deltas)
            place += 1 + len(drafts)
        first_chunk = len(sequences) - plan.num_chunks
        chunks = compress(sequences[first_chunk:], plan.is_sampled[first_chunk:])
        self._append_singles(chunks, place, deltas)
        return deltas

    def _append_singles(self, sequences: Iterable[Sequence], first_place: int, deltas: list[SequenceDelta]) -> None:
        """Append one token to each sequence; those of the first stand at ``first_place``."""
        tokens = self.tokens
        logprobs, errors, ended, sampled = tokens.logprobs, tokens.errors, tokens.ended, tokens.token_ids
        for place, seq in enumerate(sequences, first_place):
            if seq.status is Status.FINISHED:
                continue
            token_ids, token_id = seq.token_ids, sampled[place]
            token_ids.append(token_id)
            delta = SequenceDelta(seq.request.request_id, [token_id], seq.num_cached_tokens)
            deltas.append(delta)
            if logprobs is not None and (entry := logprobs[place]) is not None:
                delta.logprobs = [entry]
            if seq.prompt_logprobs is not None:
                delta.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
            is_ended = place in ended
            if len(token_ids) >= seq.max_len or token_id in seq.stop_token_ids or is_ended or place in errors:
                self._judge(seq, delta, errors.get(place), is_ended=is_ended)

    def _append_drafts(self, seq: Sequence, drafts: list[int], place: int, deltas: list[SequenceDelta]) -> None:
        """Append what was sampled as far as the drafts before it are right; the keys of the others count no longer."""
        if seq.status is Status.FINISHED:
            return
        sampled = self.tokens.token_ids[place : place + len(drafts)]
        is_wrong = (draft != token_id for draft, token_id in zip(drafts, sampled, strict=True))
        num_accepted = next(compress(count(), is_wrong), len(drafts))
        seq.num_computed -= len(drafts) - num_accepted
        self.num_draft_tokens += len(drafts)
        self.num_accepted_tokens += num_accepted
        own: list[SequenceDelta] = []
        for step in range(num_accepted + 1):
            self._append_singles((seq,), place + step, own)
        deltas += join_deltas(own)
        if seq.status is Status.VERIFYING:
            self.planner.resume(seq)

    def _judge(self, seq: Sequence, delta: SequenceDelta, error: str | None, *, is_ended: bool) -> None:
        """Decide whether ``seq`` ends with the token that ``delta`` carries; ``is_ended``: by its grammar."""
        token_id = delta.token_ids[0]
        if error is not None or len(seq.token_ids) > seq.max_len:  # no token at all, or one too many: max_tokens is 0
            seq.token_ids.pop()
            delta.token_ids, delta.logprobs = [], None
            delta.error = error
            delta.finish_reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        elif token_id in seq.stop_token_ids and seq.num_output_tokens >= seq.params.min_tokens:
            delta.stop_token_id = token_id
            delta.finish_reason = FinishReason.STOP
        elif is_ended:
            delta.finish_reason = FinishReason.STOP
        elif len(seq.token_ids) >= seq.max_len:
            delta.finish_reason = FinishReason.LENGTH
        if delta.finish_reason is not None:
            if error is None:  # found at once by who goes on from here, though a launched step may still contain it
                self.memory.publish(seq, len(seq.token_ids) - 1)
            self.end(seq, delta.finish_reason)
