"""Pipeline stages whose neighbours are not there: what they would send about shapes, so that rank 0's schedule can be recorded.

The outputs of every stage are taken to have the shape of its inputs, as those of a transformer's blocks do. The time in which
a stage waits for other stages is in no recording of one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ddltool.analyzers.step.recording.packages import NOTE
from ddltool.analyzers.step.recording.recorder import Recorder


def stand_in_neighbours(module: Any, recorder: Recorder) -> None:
    """Let pipeline stages exchange shapes with themselves in place of their neighbours, which are on other ranks.

    ``module`` is ``torch.distributed.pipelining.stage``. Before the first step its stages send each other descriptions
    (shapes and types) of the tensors that they will send. Every stage is taken to receive the description that this rank
    sent forward last.
    """
    sent: list[Any] = []  # descriptions of what this rank's stages sent forward, the latest last
    stage_type = module.PipelineStage

    def note_waits() -> None:
        """Add to the recording's assumptions the remark that waits for other stages are left out.

        A remark is a key that begins with ``NOTE``; its value is not used.
        """
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
        """Return the stages' vote on whether shapes are the same in every step: (1,) with 1 for yes, else 0.

        This stage alone decides, and all others are taken to agree. ``received_acc``, the others' votes, is not used.
        """
        stage._votes_for_static = not InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    def result(stage: Any, received_result: Any = None) -> Any:
        """Return the outcome of the vote, which is this stage's own: (1,) with 1 for static shapes, else 0."""
        return torch.tensor([int(stage._votes_for_static)], dtype=torch.int32)

    stage_type._send_meta, stage_type._recv_meta = send, receive
    stage_type._warmup_forward_vote, stage_type._warmup_backward_result = vote, result
