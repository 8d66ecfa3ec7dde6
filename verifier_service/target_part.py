"""What every rank loads: its part of the target, and the ranks it shares the work with."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.shard import WHOLE, Shard
from tandem.config import ParallelConfig, StackConfig, VerifierConfig
from tandem.errors import StartupError
from tandem.expert_files import read_placement
from tandem.torch_setup import leave_cores_to_native, pick_device, set_threads
from verifier_service.features import FeatureProjection, projection
from verifier_service.models.architectures import read_config
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import Placement, load_served_model
from verifier_service.models.native_decoder import NativeDecoder
from verifier_service.parallel.launch import Member
from verifier_service.parallel.ranks import ALONE, Group, Parallel
from verifier_service.parallel.shared_memory import SharedMemoryRanks


@dataclass(frozen=True)
class TargetPart:
    """One rank's part."""

    model: DecoderModel | NativeDecoder
    device: torch.device
    group: Group | None
    """None where the target has one rank."""
    placement: Placement | None
    """None: experts are split over the ranks in order of ids."""


def load_part(
    config: StackConfig, folder: CheckpointFolder, member: Member, progress: Callable[[str, int], None] | None = None
) -> TargetPart:
    """Load it from the target's folder, in the thread that will run it. StartupError as load_model's."""
    section = config.verifier
    device = pick_device(section.device, "verifier.device")
    if member.size == 1:
        set_threads(section.threads)
    else:
        set_threads(section.threads or max(1, len(os.sched_getaffinity(0)) // member.local_size))
        if device.type == "cuda":
            device = torch.device("cuda", member.local_rank)
            torch.cuda.set_device(device)
    group = _group(member, device)
    parallel = _split(section.parallel, group) if group else ALONE
    placement = _placement(folder, section.parallel)
    model = _model(section, folder, device, parallel, placement, progress)
    return TargetPart(model, device, group, placement)


def feature_projection(config: StackConfig, part: TargetPart) -> FeatureProjection | None:
    """The draft model's first step, beside this target; None without a draft model. StartupError as its own."""
    if config.draft_model is None:
        return None
    model = part.model
    int8 = config.drafter.quantization == "int8"
    make = partial(model.projection, int8=int8) if isinstance(model, NativeDecoder) else projection
    return FeatureProjection(config.draft_model, model.config, model.dtype, part.device, make)


def _model(
    section: VerifierConfig,
    folder: CheckpointFolder,
    device: torch.device,
    parallel: Parallel,
    placement: Placement | None,
    progress: Callable[[str, int], None] | None,
) -> DecoderModel | NativeDecoder:
    dtype = getattr(torch, section.dtype)
    model = load_served_model(folder, dtype, device, section.cpu_kernels, parallel, placement, progress)
    if isinstance(model, NativeDecoder):
        leave_cores_to_native()
    return model


def _placement(folder: CheckpointFolder, config: ParallelConfig) -> Placement | None:
    if config.placement is None:
        return None
    mixture = read_config(folder).mixture
    if mixture is None:
        raise StartupError(f"verifier.parallel.placement: {folder.path} has no mixture of experts")
    return read_placement(config.placement, mixture.layers, mixture.experts, config.ep)


def _group(member: Member, device: torch.device) -> Group | None:
    if member.size == 1:
        return None
    if device.type == "cpu" and member.memory:
        return SharedMemoryRanks(member.memory, member.rank, member.size)
    from verifier_service.parallel.distributed import DistributedRanks

    return DistributedRanks(member, device)


def _split(config: ParallelConfig, group: Group) -> Parallel:
    mine = Shard(group.rank, group.size)
    return Parallel(group, mine if config.tp > 1 else WHOLE, mine, config.experts == "cut")
