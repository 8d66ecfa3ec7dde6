"""From a config to how steps of fixed shape are run. The same on every rank."""

import torch

from tandem.config import StackConfig, VerifierConfig
from tandem.errors import StartupError
from tandem.graphs import driver_for
from verifier_service.buckets import BucketLimits
from verifier_service.models.target_model import TargetModel
from verifier_service.static_step import StaticPlan


def context_of(section: VerifierConfig, model: TargetModel) -> int:
    """Tokens a sequence may hold: what is asked for, as far as the KV goes. StartupError if the target has fewer."""
    wanted = section.max_context or model.max_positions
    if wanted > model.max_positions:
        raise StartupError(f"verifier.max_context: must be at most the target's {model.max_positions}")
    return min(wanted, (section.kv_blocks - 1) * section.kv_block_tokens)


def plan_static(config: StackConfig, model: TargetModel, device: torch.device) -> StaticPlan | None:
    """None where verifier.graphs has steps run in the shapes they happen to have."""
    section = config.verifier
    if not section.graphs.fixed_shapes(device.type):
        return None
    nodes = section.max_draft_nodes if config.speculates else 0
    sequences = section.max_running_sequences
    largest = section.max_prefill_rows + sequences * (1 + nodes)
    limits = BucketLimits(
        rows=min(section.graphs.max_rows, largest),
        sequences=sequences,
        nodes=nodes,
        context=context_of(section, model) + nodes,
    )
    return StaticPlan(limits, driver_for(device), section.graphs.eager_fallback, section.parallel.ep > 1)
