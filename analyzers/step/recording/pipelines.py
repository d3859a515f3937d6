"""Pipeline stages whose neighbours are not there: what they would say of shapes, so that rank 0's schedule can be recorded.

A stage hands on what it gets in shape, as the blocks of a transformer do. The time in which it waits for other stages is in
no recording of one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ddltool.analyzers.step.recording.packages import NOTE
from ddltool.analyzers.step.recording.recorder import Recorder


def stand_in_neighbours(module: Any, recorder: Recorder) -> None:
    """Let the stages of ``torch.distributed.pipelining.stage`` answer for their neighbours."""
    from torch.distributed.pipelining._utils import InferenceMode, _StageBackwardMeta, _StageForwardMeta

    sent: list[Any] = []
    stage_type = module.PipelineStage

    def send(stage: Any, meta: Any, _to: int) -> None:
        if isinstance(meta, _StageForwardMeta):
            sent.append(meta)

    def receive(stage: Any, source: int) -> Any:
        recorder.step.assumed[f"{NOTE}the time in which a pipeline's stages wait for each other is not counted"] = 1
        if source > stage.stage_index:
            return _StageBackwardMeta(backward_metas=stage._stage_meta.outputs)
        if not sent:
            raise RuntimeError("stages before this one say nothing of their shapes; give the stage its input_args")
        return sent[-1]

    def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        stage._votes_for_static = not InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    def result(stage: Any, received_result: Any = None) -> Any:
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    stage_type._send_meta, stage_type._recv_meta = send, receive
    stage_type._warmup_forward_vote, stage_type._warmup_backward_result = vote, result
