"""From the configuration to a draft model that is ready to draft."""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.draft_network import DraftNetwork
from drafter_service.drafter import ServedModel
from drafter_service.metrics import DrafterMetrics
from drafter_service.native_draft_model import NativeDraftModel, why_not_native
from drafter_service.paged_draft_model import PagedDraftModel
from tandem.checkpoints.draft_config import DraftConfig
from tandem.config import DrafterConfig
from tandem.errors import StartupError
from tandem.native.choice import takes_native
from tandem.torch_setup import leave_cores_to_native, pick_device, set_threads

logger = logging.getLogger(__name__)

_WARM_UP_CONTEXT = 64
_WARM_UP_BATCHES = (1, 2, 4, 8)


def load_draft_model(
    draft_folder: Path, target_folder: Path, section: DrafterConfig, metrics: DrafterMetrics
) -> ServedModel[Any]:
    """Load and warm up. StartupError names the key, file or tensor that is wrong."""
    set_threads(section.threads)
    device, dtype = pick_device(section.device, "drafter.device"), getattr(torch, section.dtype)
    started = time.perf_counter()
    int8 = section.quantization == "int8"
    if int8 and device.type != "cpu":
        raise StartupError(f"drafter.quantization: int8 is for CPUs, the device is {device.type}")
    native = _takes_native(section, DraftConfig.load(draft_folder), dtype, device)
    network = DraftNetwork.load(draft_folder, target_folder, dtype, device, int8 and not native)
    model: DraftModel | NativeDraftModel | PagedDraftModel
    graphs = section.graphs
    if native:
        model = NativeDraftModel(network, int8, torch.get_num_threads())
        leave_cores_to_native()
    elif graphs.fixed_shapes(device.type):
        model = PagedDraftModel(network, metrics, section.kv_blocks, section.kv_block_tokens, graphs.eager_fallback)
    else:
        model = DraftModel(network)
    loaded = time.perf_counter()
    _warm_up(model)
    logger.info(
        "loaded %s for %s on %s in %.1fs, warmed up in %.1fs",
        draft_folder.name,
        target_folder.name,
        device,
        loaded - started,
        time.perf_counter() - loaded,
    )
    return model


def _takes_native(section: DrafterConfig, config: DraftConfig, dtype: torch.dtype, device: torch.device) -> bool:
    if section.cpu_kernels == "torch":
        return False
    if device.type != "cpu" and section.cpu_kernels == "auto":
        return False
    reason = f"the device is {device.type}" if device.type != "cpu" else None
    if section.graphs.mode == "on":
        reason = reason or "graphs are on"
    reason = reason or why_not_native(config, dtype)
    return takes_native(section.cpu_kernels, reason, "draft model", "drafter.cpu_kernels")


def _warm_up(model: ServedModel[Any]) -> None:
    """The first call of each shape is several times slower, as kernels are built for it: take the common ones now."""
    config = model.config
    blocks = []
    for _ in range(max(_WARM_UP_BATCHES)):
        kv = model.new_context()
        if not model.reserve(kv, _WARM_UP_CONTEXT):
            return
        model.write_context([ContextRows(kv, 0, torch.zeros(_WARM_UP_CONTEXT, config.hidden_size))])
        blocks.append(BlockRequest(kv, _WARM_UP_CONTEXT, anchor=0, nodes=config.block_size - 1))
    for rows in range(1, config.block_size + 1):
        model.write_context([ContextRows(blocks[0].kv, 0, torch.zeros(rows, config.hidden_size))])
    for batch in _WARM_UP_BATCHES:
        model.draft(blocks[:batch])
