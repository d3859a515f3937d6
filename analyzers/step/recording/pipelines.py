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
    """Let pipeline stages exchange shapes with themselves in place of their neighbours, which are on other ranks.

    ``module`` is ``torch.distributed.pipelining.stage``. Its stages tell each other the shapes of what they will send
    before the first step; every stage is taken to get what this rank sent forward last.
    """
    sent: list[Any] = []  # descriptions of what this rank's stages sent forward, the latest last
    stage_type = module.PipelineStage

    def note_waits() -> None:
        """Note among the assumptions that the recording leaves out waits for other stages; of a note only the key counts."""
        recorder.step.assumed[f"{NOTE}the time in which a pipeline's stages wait for each other is not counted"] = 1

    def last_sent() -> Any:
        """Return the description of what this rank's stages last sent forward. Raises RuntimeError where nothing was sent."""
        if not sent:
            raise RuntimeError("stages before this one say nothing of their shapes; give the stage its input_args")
        return sent[-1]

    def send_objects(objects: list[Any], *_: Any, **__: Any) -> None:
        """Keep the description of a stage's outputs, a list of objects."""
        note_waits()
        sent.append(list(objects))

    def receive_objects(objects: list[Any], *_: Any, **__: Any) -> None:
        """Fill the list with what was last sent forward."""
        objects[:] = last_sent()

    # An older torch's stages send lists of objects; newer ones send descriptions, and vote on whether shapes are static.
    if not hasattr(stage_type, "_send_meta"):
        module.dist.send_object_list, module.dist.recv_object_list = send_objects, receive_objects
        return
    from torch.distributed.pipelining._utils import InferenceMode, _StageBackwardMeta, _StageForwardMeta

    def send(stage: Any, meta: Any, _to: int) -> None:
        """Keep what a stage says of its outputs' shapes."""
        if isinstance(meta, _StageForwardMeta):
            sent.append(meta)

    def receive(stage: Any, source: int) -> Any:
        """Return the description that the stage at index ``source`` would send to ``stage``.

        From a later stage it describes gradients, which are shaped like the outputs of ``stage``; from an earlier one
        it is what was last sent forward.
        """
        note_waits()
        if source > stage.stage_index:
            return _StageBackwardMeta(backward_metas=stage._stage_meta.outputs)
        return last_sent()

    def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        """Return 1 as a tensor where the shapes are static, as this stage alone decides; all others are taken to agree."""
        stage._votes_for_static = not InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    def result(stage: Any, received_result: Any = None) -> Any:
        """Return the outcome of the vote, which is this stage's own."""
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    stage_type._send_meta, stage_type._recv_meta = send, receive
    stage_type._warmup_forward_vote, stage_type._warmup_backward_result = vote, result
