"""A process with its share of a model: it does what rank 0 tells it until rank 0 is gone."""

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ..config import EngineConfig
from ..errors import EngineError, one_line
from ..execution.model_runner import ModelRunner
from ..sharding.ranks import ProcessRanks
from .messages import (
    SHOW,
    Begin,
    CopyBlocks,
    Failed,
    ForgetSwapped,
    HoldAdapters,
    Loaded,
    NextStep,
    Order,
    SwapIn,
    SwapOut,
    Task,
    WholeStep,
    ZeroBlocks,
)
from .shared_adapters import OwnAdapters
from .step_messages import StepReader

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Follower:
    """Carries out orders, one after the other, on this rank's share of the weights and of the KV cache."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, ranks: ProcessRanks) -> None:
        self._runner = runner
        self._steps = StepReader(config.block_size, runner.device, ranks)
        self._swapped: dict[int, list[Tensor]] = {}
        self._adapters = None if runner.adapters is None else OwnAdapters(runner.adapters, ranks)

    @torch.inference_mode()
    def carry_out(self, order: Order) -> None:
        memory = self._runner.memory
        match order:
            case WholeStep() | NextStep():
                self._runner.execute(self._steps.batch(order))
            case CopyBlocks(pairs):
                memory.copy(pairs)
            case ZeroBlocks(blocks):
                memory.zero(blocks)
            case SwapOut(number, blocks):
                self._swapped[number] = memory.swap_out(blocks)
            case SwapIn(number, first, blocks):
                memory.swap_in(self._swapped[number], first, blocks)
            case ForgetSwapped(numbers):
                for number in numbers:
                    del self._swapped[number]
            case HoldAdapters(numbers, new):
                assert self._adapters is not None
                # Rank 0 knows of it too, and says what is held instead.
                with suppress(torch.OutOfMemoryError):
                    self._adapters.hold(numbers, new)


def main() -> int:
    """Called with the number of the socket to rank 0 and rank 0's process id; returns the exit status."""
    _die_with(int(sys.argv[2]))
    # Rank 0 decides when to stop, also where a terminal or a service manager signals the whole group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW, all_threads=True)
    leader = Connection(int(sys.argv[1]))
    # Rank 0 has closed its engine, or is gone.
    with suppress(EOFError, ConnectionError):
        return _follow(leader)
    return 0


def _follow(leader: Connection) -> int:
    task: Task = leader.recv()
    try:
        follower = _loaded(task, leader)
        while True:
            follower.carry_out(pickle.loads(leader.recv_bytes()))
    except (EOFError, ConnectionError):
        raise
    # The boundary of this process: rank 0 is told of whatever it was.
    except Exception as error:
        is_told = isinstance(error, EngineError)
        if not is_told:
            logger.exception("rank %d of the model fails", task.rank)
        leader.send(Failed(str(error) if is_told else one_line(error), is_told))
        return 1


def _loaded(task: Task, leader: Connection) -> Follower:
    config = task.config
    if config.device == "cuda":
        # Kernels run on the current device.
        torch.cuda.set_device(task.rank)

    def meet() -> None:
        leader.send(Loaded())
        begin = leader.recv()
        assert isinstance(begin, Begin)

    device = torch.device(config.device)
    ranks = ProcessRanks(
        task.rank, config.tensor_parallel_size, device, task.rendezvous, meet, config.pipeline_parallel_size
    )
    return Follower(ModelRunner(task.model_config, config, ranks=ranks), config, ranks)


def _die_with(parent_pid: int) -> None:
    """Have this process killed when the thread that started it ends, on Linux; elsewhere its socket tells it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent_pid:
            sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
