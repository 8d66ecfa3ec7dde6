"""The target over whole sequences at once: hidden states of data that was not kept while it was written."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tandem.kernels.step_tables import StepTables, TableShape
from verifier_service.models.target_model import ForwardBatch, TargetModel
from verifier_service.step import SegmentRows


def prefill(
    model: TargetModel, sequences: Sequence[Sequence[int]], kv: list[torch.Tensor], tap_layers: tuple[int, ...]
) -> list[torch.Tensor]:
    """Taps and final hidden state of every token: per sequence [tokens, (tapped layers + 1) * hidden_size].

    kv: a pool per layer with a block of one token for each, one after another; where only the result matters, the same
    pool for all layers.
    """
    lengths = [len(s) for s in sequences]
    device = kv[0].device
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    def attend(q: torch.Tensor, pool: torch.Tensor, scale: float) -> torch.Tensor:
        rows = pool.flatten(0, 1)
        out = torch.empty_like(q)
        for start, end in spans:
            queries = q[start:end].transpose(0, 1)
            keys, values = rows[start:end, 0].transpose(0, 1), rows[start:end, -1].transpose(0, 1)
            groups = queries.shape[0] // keys.shape[0]
            folded = queries.view(keys.shape[0], groups, *queries.shape[1:])
            # Heads of one group are a batch over the same keys.
            keys, values = (t[:, None].expand(-1, groups, -1, -1) for t in (keys, values))
            attended = F.scaled_dot_product_attention(folded, keys, values, is_causal=True, scale=scale)
            out[start:end] = attended.flatten(0, 1).transpose(0, 1)
        return out.flatten(1)

    batch = ForwardBatch(
        token_ids=torch.tensor([token for s in sequences for token in s], device=device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        slots=torch.arange(ends[-1], device=device),
        attention=attend,
        tables=step_tables(model, sequences, [list(range(*span)) for span in spans], 1),
    )
    hidden, taps = model.forward(batch, kv, tap_layers)
    rows = torch.cat([taps, hidden], dim=-1)
    return [rows[start:end] for start, end in spans]


def step_tables(
    model: TargetModel, sequences: Sequence[Sequence[int]], blocks: Sequence[list[int]], block_tokens: int
) -> StepTables | None:
    """Of sequences' first tokens, with the KV of sequence i in blocks[i], for a model that wants tables."""
    if not model.wants_tables:
        return None
    pairs = zip(sequences, blocks, strict=True)
    segments = [SegmentRows(i, 0, list(tokens), [], mine) for i, (tokens, mine) in enumerate(pairs)]
    shape = TableShape.holding(segments, 1, block_tokens)
    tables = StepTables.over(torch.empty(shape.size, dtype=torch.int32), shape)
    tables.write(segments)
    return tables


class TapComputer:
    """Computes rows of conversations, as many at once as fit into `max_rows`."""

    def __init__(self, model: TargetModel, tap_layers: tuple[int, ...], device: torch.device, max_rows: int = 2048):
        self._model = model
        self._tap_layers = tap_layers
        self._max_rows = max_rows
        self._device = device

    @torch.inference_mode()
    def rows(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Per sequence [tokens, width], in order, in bf16 on the CPU."""
        results: list[torch.Tensor] = []
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > self._max_rows:
                results += self._run(batch)
                batch = []
            batch.append(sequence)
        return results + (self._run(batch) if batch else [])

    def _run(self, batch: list[Sequence[int]]) -> list[torch.Tensor]:
        shape = self._model.kv_shape(sum(map(len, batch)), 1)
        pool = torch.empty(shape, dtype=self._model.dtype, device=self._device)
        rows = prefill(self._model, batch, [pool] * self._model.layers, self._tap_layers)
        return [r.to("cpu", torch.bfloat16) for r in rows]
