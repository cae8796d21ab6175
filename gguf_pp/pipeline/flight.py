"""A ubatch on its way, and the requests whose rows it has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gguf_pp.batch import Choice, Late, Span, UBatch
from gguf_pp.pipeline.executor import Ticket
from gguf_pp.request import Request


class Flight:
    """The next rows of some requests. `emitting` are those that get a token from it, `tokens` what
    they get, or NO_TOKEN, once the ticket has been waited for. `decodes` is whether these are
    decode steps."""

    ticket: Ticket

    def __init__(
        self,
        parts: Sequence[tuple[Request, int]],
        parcels: list[int],
        *,
        chooses: bool,
        decodes: bool,
    ) -> None:
        """Take so many rows of each request. One of the free `parcels` is taken, if there are any
        and tokens come to be in it. `chooses` is whether the last device chooses tokens."""
        self.requests = [request for request, _ in parts]
        self.emitting: list[Request] = []
        self.decodes = decodes
        tokens: list[int] = []
        spans: list[Span] = []
        outputs: list[int] = []
        late: list[Late] = []
        for request, n in parts:
            spans.append(Span(request.slot, request.n_queued, n))
            known = request.tokens[request.n_queued : request.n_queued + n]
            if not known:
                assert request.promised is not None
                late.append(Late(len(tokens), *request.promised))
            tokens += known or [0]
            request.n_queued += n
            request.n_in_flight += 1
            if request.n_queued >= len(request.tokens):
                outputs.append(len(tokens) - 1)
                self.emitting.append(request)
        choices = tuple(r.sampler.choice() for r in self.emitting) if chooses else ()
        parcel = self._promise(parcels, choices)
        self.tokens = [0] * len(outputs)
        self.ubatch = UBatch(
            tuple(tokens), tuple(spans), tuple(outputs), tuple(late), choices, parcel
        )

    def _promise(self, parcels: list[int], choices: Sequence[Choice | None]) -> int | None:
        """Tell requests where their tokens will be left: those that are chosen in the stream of the
        last device, there by samplers or by itself. Returns the parcel."""
        early = [choice is not None for choice in choices] or [True] * len(self.emitting)
        parcel = parcels.pop() if any(early) and parcels else None
        for i, (request, is_early) in enumerate(zip(self.emitting, early, strict=True)):
            request.promised = (parcel, i) if parcel is not None and is_early else None
        return parcel

    @property
    def is_surplus(self) -> bool:
        """Whether nobody waits for what it computes."""
        return all(request.finish_reason is not None for request in self.requests)

    def take(self, made: Tensor, rows: range) -> list[int]:
        """As in executor.Take: choose from logits, or note what the device has chosen."""
        if made.dtype == torch.int32:
            chosen: list[int] = made.tolist()
        else:
            logits = made.numpy()
            chosen = [self.emitting[i].sampler(logits[i - rows.start]) for i in rows]
        self.tokens[rows.start : rows.stop] = chosen
        return chosen
