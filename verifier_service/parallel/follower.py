"""The ranks behind rank 0: load a part of the target, then run what rank 0 says until it says stop."""

import gc
import logging
import signal
import sys
import time

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.config import StackConfig
from tandem.errors import StartupError, Unavailable
from verifier_service.parallel.launch import Member
from verifier_service.parallel.links import Leader
from verifier_service.parallel.step_message import unpack
from verifier_service.static_plan import plan_static
from verifier_service.static_step import StaticStep
from verifier_service.step_executor import StepExecutor
from verifier_service.target_part import load_part

logger = logging.getLogger(__name__)


def follow(config: StackConfig, member: Member) -> None:
    """Returns when the work is over. Exits 1 when it fails, having told rank 0 why, and when rank 0 is gone."""
    # The stop comes from rank 0, which lets calls in flight end first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    leader = Leader(member.links[0])
    try:
        _run(config, member, leader)
    except StartupError as error:
        leader.give_up(str(error))
        sys.exit(1)
    except Unavailable as error:
        # Another rank broke off. Its own end must reach rank 0 first, to be the one that is named.
        time.sleep(1.0)
        leader.give_up(str(error))
        sys.exit(1)
    except Exception as error:
        logger.exception("this rank fails")
        leader.give_up(f"{type(error).__name__}: {error}")
        sys.exit(1)


@torch.inference_mode()
def _run(config: StackConfig, member: Member, leader: Leader) -> None:
    part = load_part(config, CheckpointFolder(config.target), member)
    section = config.verifier
    executor = StepExecutor(part.model, section.kv_blocks, section.kv_block_tokens, part.device)
    plan = plan_static(config, part.model, part.device)
    static = StaticStep(executor, part.model, plan, decides=False) if plan else None
    leader.ready()
    if static:
        static.capture()
    gc.freeze()
    while (message := leader.receive()) is not None:
        step = unpack(message)
        executor.move(step.moves)
        bucket = static.bucket_for(step.segments, len(step.logit_rows)) if static else None
        if static and bucket:
            static.run(bucket, step.segments, step.logit_rows, [False] * len(step.segments))
            continue
        computed = executor.forward(step.segments)
        if part.model.head_is_split:
            executor.logits(computed.hidden, step.logit_rows)
